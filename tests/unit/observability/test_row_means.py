"""Rows of a long run as means: few stay as they are, many keep their sums, and memory does not grow."""

import pytest

from rlhf_ray.observability import row_means
from rlhf_ray.observability.row_means import MOST, ROWS, mean_rate, thinned


def run_of(steps, evaluated=50):
    for step in range(1, steps + 1):
        yield {"step": step, "time": step + 0.5, "reward/mean": float(step), "policy/loss": None if step % 3 else 6.0}
        if step % evaluated == 0:
            yield {"step": step, "time": step + 0.75, "eval/reward": step / 10}


def test_few_rows_stay_as_they_are():
    rows = list(run_of(100))
    assert thinned(iter(rows)) == rows


@pytest.mark.parametrize("steps", [40, 41, 1000, 4567])
def test_of_many_rows_the_first_the_last_and_all_means_between_them_are_kept(monkeypatch, steps):
    monkeypatch.setattr(row_means, "MOST", 16)
    rows = thinned(run_of(steps))
    each = [row for row in rows if "reward/mean" in row]
    assert len(each) <= 18 and [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert each[0] == next(run_of(1)) and (each[-1]["step"], each[-1]["reward/mean"]) == (steps, steps)
    assert sum(row.get(ROWS, 1) for row in each) == steps
    assert sum(row["reward/mean"] * row.get(ROWS, 1) for row in each) == pytest.approx(steps * (steps + 1) / 2)
    assert len({row.get(ROWS, 1) for row in each[1:-2]}) == 1, "equally many in each, but for the newest"
    assert {row["policy/loss"] for row in each[1:-1]} <= {6.0, None}
    evaluations = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert evaluations[:1] == ([5.0] if steps >= 50 else []) and len(evaluations) <= 18
    assert evaluations[-1:] == [step / 10 for step in (steps // 50 * 50,) if step]


def test_what_rows_have_only_if_it_is_not_zero_counts_as_zero():
    rows = [{"step": n, "time": n, "time/step": 1.0, **({"share/generator/reward_scorer": 0.5} if n % 4 == 0 else {})}
            for n in range(1, 2 * MOST + 1)]
    means = thinned(rows)
    total = sum((row.get("share/generator/reward_scorer") or 0.0) * row.get(ROWS, 1) for row in means)
    assert total == pytest.approx(0.5 * MOST / 2)


def test_a_mean_rate_is_that_of_the_whole_time():
    rows = [{"rate": 10.0, "time/step": 1.0}, {"rate": 10 / 9, "time/step": 9.0}, {"rate": None, "time/step": 5.0}]
    assert mean_rate(rows, "rate") == pytest.approx(2.0) and mean_rate(rows, "other") is None
    assert mean_rate([{**rows[0], ROWS: 9}, rows[1]], "rate") == pytest.approx(100 / 18)
