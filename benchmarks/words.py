"""Each figure in words, in the order in which people read them."""

from benchmarks.figure import Figure

TITLES = {
    "vs_trl_samples_per_second": "Samples a second beside TRL",
    "rollout_vs_raw_vllm": "Rollouts beside vLLM itself",
    "learner_vs_torch": "Learner beside bare torch",
    "learner_vs_padded": "Packed rows beside padded ones",
    "learner_vs_padded_torch": "Learner beside bare torch on padded rows",
    "publish_vs_copies_100mb": "Publishing 100 MB beside its copies",
    "publish_vs_copies_400mb": "Publishing 400 MB beside its copies",
    "publish_pause_share": "Generation paused while publishing",
    "async_speedup": "One version of staleness beside none",
    "coordinator_efficiency_256": "Throughput of 256 generators beside the ideal",
    "coordinator_ms_per_sample": "The coordinator's CPU time a sample",
    "coordinator_bytes_per_sample": "Bytes through the coordinator a sample",
    "first_token_seconds": "From the command to the first token",
    "plan_memory_error": "Memory planned beside memory held",
}
"""The figures that the project promises."""


def title(name: str) -> str:
    """A figure's title: its name, for one that is not among the promised."""
    return TITLES.get(name, name)


def ordered(names: list[str]) -> list[str]:
    """Promised figures in their order, then the others in theirs."""
    return [name for name in TITLES if name in names] + [name for name in names if name not in TITLES]


def shown(value: float, unit: str) -> str:
    """A measured number with its unit."""
    return f"{value:,.0f} {unit}".rstrip() if abs(value) >= 1000 else f"{value:.3g} {unit}".rstrip()


def is_ratio(figure: Figure) -> bool:
    """Whether the figure is one side over another, so that `unit` is the sides' and not its own."""
    return bool(figure.theirs_is)


def shown_value(figure: Figure, value: float | None = None) -> str:
    """The figure (or another value of its kind) as people read it: "0.93 x", "0.21 ms"."""
    number = figure.value if value is None else value
    return f"{number:.3g} x" if is_ratio(figure) else shown(number, figure.unit)


def shown_goal(figure: Figure) -> str:
    """What the figure has to reach."""
    return f"{'≥' if figure.better == 'higher' else '≤'} {shown_value(figure, figure.goal)}"
