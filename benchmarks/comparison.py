"""A comparison of two ways to do the same work: what they are, and turns taken by one and the other.

Each side lives in a separate process, kept for the whole comparison; an idle side only waits. Turns alternate, and
the order within a pair does too, so a machine that grows slower for a while slows both. A comparison is refused when
the two sides did not do the same work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

from benchmarks.figure import Figure
from benchmarks.side_process import Side, SideProcess, Turn


class Runner(Protocol):
    """What takes turns; `SideProcess`, but for tests."""

    def turn(self) -> Turn:
        """Do the work once."""
        ...


@dataclass(frozen=True)
class Benchmark:
    """Two ways to do the same work."""

    ours: Callable[[Path], Side]
    theirs: Callable[[Path], Side]
    ours_is: str
    theirs_is: str
    unit: str
    """"tokens/s": amount a second, more is better; or "s": seconds for each of the amount, less is better."""
    goal: float
    """What the ratio ours / theirs has to reach."""
    tolerance: float = 0.0
    """Relative difference up to which two numbers of the sides' proofs count as equal."""
    agreement: float = 1.0
    """Share of the proofs' numbers that must be equal."""


class DifferentWork(Exception):
    """The sides' results differ, so their times mean nothing beside each other."""


def compare(name: str, benchmark: Benchmark, directory: Path, repeats: int) -> Figure:
    """Start both sides on the workload in `directory`, warm each up with one turn, and let them take turns.

    Raises:
        DifferentWork: see there.
        SideFailed: a side could not start, failed in a turn or did not answer in time.
    """
    with (SideProcess(f"{name}, ours", benchmark.ours, directory) as ours,
          SideProcess(f"{name}, other side", benchmark.theirs, directory) as theirs):
        return measure(name, benchmark, ours, theirs, repeats)


def measure(name: str, benchmark: Benchmark, ours: Runner, theirs: Runner, repeats: int) -> Figure:
    """One warm-up turn each, then `repeats` pairs of turns; errors as in `compare`."""
    pairs: list[tuple[Turn, Turn]] = []
    for number in range(repeats + 1):
        if number % 2:
            mine, other = ours.turn(), theirs.turn()
        else:
            other, mine = theirs.turn(), ours.turn()
        require_same_work(name, benchmark, mine, other)
        pairs.append((mine, other))
    measured = [(value(benchmark, mine), value(benchmark, other)) for mine, other in pairs[1:]]
    ratios = [mine / other for mine, other in measured]
    return Figure(
        value=median(ratios), repeats=ratios, better=better(benchmark), goal=benchmark.goal,
        ours_is=benchmark.ours_is, theirs_is=benchmark.theirs_is, unit=benchmark.unit,
        ours=median(mine for mine, _ in measured), theirs=median(other for _, other in measured),
        cpu_share=median(turn.cpu_seconds / turn.seconds for pair in pairs[1:] for turn in pair),
    )


def better(benchmark: Benchmark) -> Literal["higher", "lower"]:
    """Which ratios speak for our side."""
    return "lower" if benchmark.unit == "s" else "higher"


def value(benchmark: Benchmark, turn: Turn) -> float:
    """A turn in the benchmark's unit."""
    return turn.seconds / turn.amount if benchmark.unit == "s" else turn.amount / turn.seconds


def require_same_work(name: str, benchmark: Benchmark, ours: Turn, theirs: Turn) -> None:
    """Compare the proofs of two turns.

    Raises:
        DifferentWork: fewer numbers agree than the benchmark asks for.
    """
    if len(ours.proof) != len(theirs.proof):
        raise DifferentWork(f"{name}: our side proves {len(ours.proof)} results, the other {len(theirs.proof)}")
    equal = [isclose(a, b, rel_tol=benchmark.tolerance) for a, b in zip(ours.proof, theirs.proof, strict=True)]
    if sum(equal) < benchmark.agreement * len(equal):
        first = equal.index(False)
        raise DifferentWork(
            f"{name}: the two sides agree on {sum(equal)} of {len(equal)} results (number {first}: "
            f"{ours.proof[first]} and {theirs.proof[first]}), so they did not do the same work and cannot be compared")
