"""A figure of the summary: the measured ratio or number, its goal, and its text for tables and pages."""

from dataclasses import dataclass, field
from typing import Any, Literal

UNDISTURBED_SHARE = 0.95
"""Least share of a CPU that turns get on a quiet machine."""


@dataclass(frozen=True)
class Figure:
    """A ratio of two things measured in one run, or a number with a unit."""

    value: float
    """The median over the repeats."""
    repeats: list[float]
    """The value of each repeat."""
    better: Literal["higher", "lower"]
    goal: float
    """The value that the project aims at."""
    ours_is: str
    theirs_is: str = ""
    """The other side; empty for a figure that is no ratio."""
    ours: float | None = None
    """Median of our side, in `unit`."""
    theirs: float | None = None
    unit: str = ""
    cpu_share: float | None = None
    """CPU time / wall time of turns that compute on one thread: well below 1, other processes ran."""
    more: dict[str, Any] = field(default_factory=dict)
    """Other numbers of the run, in plain types."""

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    @property
    def disturbed(self) -> bool:
        """Whether other processes took part of the cores."""
        return self.cpu_share is not None and self.cpu_share < UNDISTURBED_SHARE


TITLES = {
    "vs_trl_samples_per_second": "Samples per second, compared with TRL",
    "step_vs_parts": "Samples per second, compared with the bare passes of a step",
    "rollout_vs_raw_vllm": "Rollouts, compared with vLLM",
    "learner_vs_torch": "Learner, compared with plain torch",
    "learner_vs_padded": "Packed rows, compared with padded rows",
    "learner_vs_padded_torch": "Learner, compared with plain torch on padded rows",
    "publish_vs_bare_100mb": "Publication of 100 MB, compared with bare copies and packing",
    "publish_vs_bare_400mb": "Publication of 400 MB, compared with bare copies and packing",
    "publish_pause_share": "Generation paused during a publication",
    "async_speedup": "One version of staleness, compared with none",
    "coordinator_efficiency_256": "Throughput of 256 generators, compared with the ideal",
    "coordinator_ms_per_sample": "The coordinator's CPU time per sample",
    "coordinator_bytes_per_sample": "Bytes through the coordinator per sample",
    "episode_turn": "A turn of an episode, compared with the engine alone",
    "episodes_per_single": "Tokens per second of episodes of eight turns, compared with single responses",
    "publication_prefill": "Open episodes after a publication, compared with reading them first",
    "open_episodes_growth": "Memory of 1,000 open episodes, the last round compared with the second",
    "open_episodes_cpu": "CPU use of 1,000 open episodes that wait",
    "episodes_growth_driver": "The driver's time per episode, 10,000 open compared with 1,000",
    "episodes_growth_runner": "The runner's time per turn, 10,000 open compared with 1,000",
    "sandbox_start": "A program in the sandbox, compared with a bare interpreter",
    "first_token_seconds": "From the command to the first token",
    "plan_memory_error": "Planned memory, compared with measured memory",
}
"""The figures that the project promises."""


def title(name: str) -> str:
    """A figure's title; its name where TITLES has none."""
    return TITLES.get(name, name)


def ordered(names: list[str]) -> list[str]:
    """Figures of TITLES in its order, then the others in theirs."""
    return [name for name in TITLES if name in names] + [name for name in names if name not in TITLES]


def shown(value: float, unit: str) -> str:
    """A measured number with its unit."""
    return f"{value:,.0f} {unit}".rstrip() if abs(value) >= 1000 else f"{value:.3g} {unit}".rstrip()


def is_ratio(figure: Figure) -> bool:
    """Whether the figure is a ratio of two sides; `unit` is then that of the sides."""
    return bool(figure.theirs_is)


def shown_value(figure: Figure, value: float | None = None) -> str:
    """The figure (or another value of its kind) as text: "0.93 x", "0.21 ms"."""
    number = figure.value if value is None else value
    return f"{number:.3g} x" if is_ratio(figure) else shown(number, figure.unit)


def shown_goal(figure: Figure) -> str:
    """The goal as text."""
    return f"{'≥' if figure.better == 'higher' else '≤'} {shown_value(figure, figure.goal)}"
