"""The comparison of two runs notices a bit, a missing value and the sign of a zero; a clock's numbers it leaves out."""

import json
import math

import numpy as np
import pytest

from tests.compare_commits import difference, metrics

ONE = np.array([1.0, 2.0], np.float32)


@pytest.mark.parametrize(("base", "head", "told"), [
    ({"w": ONE}, {"w": ONE.copy()}, "equal"),
    ({"w": ONE}, {"w": np.nextafter(ONE, np.float32(3))}, "w[0]: 1.0 became 1.0000001"),
    ({"w": ONE}, {"w": ONE.astype(np.float64)}, "w: float32[2] became float64[2]"),
    ({"m": math.nan}, {"m": math.nan}, "equal"),
    ({"m": 0.0}, {"m": -0.0}, "m: 0.0 became -0.0"),
    ({"m": 1.0, "n": 2.0}, {"m": 1.0}, "n: only BASE has it"),
    ({"m": 1.0}, {"m": 1.0, "n": 2.0}, "n: only HEAD has it"),
])
def test_a_difference_is_found_and_nothing_else(base, head, told):
    assert difference(base, head).startswith(told)


def test_of_what_a_clock_tells_the_name_is_compared(tmp_path):
    sides = []
    for side, seconds in (("base", 1.5), ("head", 2.5)):
        (tmp_path / side).mkdir()
        row = {"step": 1, "time": seconds, "reward/mean": 0.5, "time/step": seconds, f"share/{side}/busy": seconds}
        (tmp_path / side / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        sides.append(dict(metrics(tmp_path / side)))
    assert difference(*sides) == "equal"
    assert {place.split()[-1] for place in sides[0]} == {"step", "time", "reward/mean", "time/step"}
