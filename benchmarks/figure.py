"""One figure of the summary: what was measured beside what, and how good it has to be."""

from dataclasses import dataclass, field
from typing import Any, Literal

UNDISTURBED_SHARE = 0.95
"""Share of a CPU that turns on a quiet machine get at least."""


@dataclass(frozen=True)
class Figure:
    """A ratio of two things measured in one run, or a number with a unit of its own."""

    value: float
    """The median over the repeats."""
    repeats: list[float]
    """What each repeat gave."""
    better: Literal["higher", "lower"]
    goal: float
    """What the project holds itself to."""
    ours_is: str
    theirs_is: str = ""
    """What it is measured beside; empty for a figure that is no ratio."""
    ours: float | None = None
    """Median of our side, in `unit`."""
    theirs: float | None = None
    unit: str = ""
    cpu_share: float | None = None
    """CPU time / wall time of turns that compute on one thread: well below 1, others ran."""
    more: dict[str, Any] = field(default_factory=dict)
    """Whatever else the run showed, in plain types."""

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    @property
    def disturbed(self) -> bool:
        """Whether other processes took part of the cores."""
        return self.cpu_share is not None and self.cpu_share < UNDISTURBED_SHARE
