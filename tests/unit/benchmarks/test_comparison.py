"""Comparisons: which turns count, what a ratio is made of, and what is refused."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.comparison import Benchmark, DifferentWork, measure
from benchmarks.side_process import SideFailed, SideProcess, Turn


class Counting:
    """A side that counts its runs."""

    def __init__(self, directory: Path) -> None:
        self._start, self._runs = float((directory / "start").read_text()), 0

    def run(self) -> float:
        self._runs += 1
        return 10.0

    def proof(self) -> list[float]:
        return [self._start + self._runs]


class Failing(Counting):
    def run(self) -> float:
        print("about to fail")
        raise ValueError("no such luck")


class Recorded:
    """Turns of 100 tokens that took the given seconds."""

    def __init__(self, name: str, seconds: list[float], order: list[str], proof: list[float]) -> None:
        self._name, self._order, self._proof = name, order, proof
        self._seconds: Iterator[float] = iter(seconds)

    def turn(self) -> Turn:
        self._order.append(self._name)
        seconds = next(self._seconds)
        return Turn(100.0, seconds, seconds / 2, self._proof)


def benchmark(unit: str, tolerance: float = 0.0, agreement: float = 1.0) -> Benchmark:
    return Benchmark(Counting, Counting, "ours", "theirs", unit, 1.5, tolerance, agreement)


def test_a_ratio_is_the_median_over_pairs_and_leaves_the_warm_up_out() -> None:
    ours, theirs = [99.0, 1.0, 2.0, 4.0], [1.0, 2.0, 2.0, 2.0]
    speed = measure("b", benchmark("tokens/s"), Recorded("o", ours, [], [1]), Recorded("t", theirs, [], [1]), 3)
    assert (speed.repeats, speed.value, speed.ours, speed.theirs) == ([2.0, 1.0, 0.5], 1.0, 50.0, 50.0)
    assert speed.cpu_share == 0.5 and speed.disturbed
    assert (speed.better, speed.reached) == ("higher", False)
    time = measure("b", benchmark("s"), Recorded("o", ours, [], [1]), Recorded("t", theirs, [], [1]), 3)
    assert (time.repeats, time.ours, time.theirs) == ([0.5, 1.0, 2.0], 0.02, 0.02)
    assert (time.better, time.reached) == ("lower", True)


def test_sides_take_turns_and_the_first_of_a_pair_changes() -> None:
    order: list[str] = []
    measure("b", benchmark("s"), Recorded("o", [1] * 4, order, [1]), Recorded("t", [1] * 4, order, [1]), 3)
    assert "".join(order) == "to" + "ot" + "to" + "ot"


@pytest.mark.parametrize(("agreement", "refused"), [(1.0, True), (0.5, False)])
def test_sides_that_did_different_work_are_not_compared(agreement: float, refused: bool) -> None:
    ours, theirs = Recorded("o", [1, 1], [], [1.0, 2.0]), Recorded("t", [1, 1], [], [1.0005, 2.1])
    asked = benchmark("s", tolerance=1e-3, agreement=agreement)
    if refused:
        with pytest.raises(DifferentWork, match=r"agree on 1 of 2 results \(number 1: 2.0 and 2.1\)"):
            measure("b", asked, ours, theirs, 1)
    else:
        assert measure("b", asked, ours, theirs, 1).value == 1


def test_a_side_keeps_its_state_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "start").write_text("7")
    with SideProcess("counting", Counting, tmp_path) as side:
        began = time.perf_counter()
        first, second = side.turn(), side.turn()
        whole = time.perf_counter() - began
    assert (first.amount, first.proof, second.proof) == (10.0, [8.0], [9.0])
    assert 0 <= first.seconds + second.seconds <= whole


def test_a_failed_side_says_why_and_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(SideFailed, match="FileNotFoundError.*start"), SideProcess("absent", Counting, tmp_path):
        pass
    (tmp_path / "start").write_text("7")
    with (SideProcess("failing", Failing, tmp_path) as side,
          pytest.raises(SideFailed, match=r"(?s)failing.*no such luck.*about to fail")):
        side.turn()
