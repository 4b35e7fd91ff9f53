"""Numbers about episodes, as metrics have them."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.environments import CAUSES
from rlhf_ray.records import Episode

EVENTS = ("tool_calls", "tool_failures", "parse_failures", "overridden", "abandoned", "retries", "interrupted",
          "continued", "restarted")
"""What is counted in every episode."""


def episode_numbers(episodes: Sequence[Episode] | None) -> dict[str, NDArray[np.float32]]:
    """[S] columns: "turns", the counted events, "masked", "cause/NAME" of each cause that occurs (0 or 1), and
    "ENVIRONMENT/NAME" of the numbers that the environments gave, NaN for episodes without one. Empty without
    episodes."""
    if episodes is None:
        return {}

    def column(numbers: Sequence[float]) -> NDArray[np.float32]:
        return np.array(numbers, dtype=np.float32)

    columns = {"turns": column([len(episode.turns) for episode in episodes])}
    for event in EVENTS:
        columns[event] = column([episode.events.get(event, 0) for episode in episodes])
    columns["masked"] = column([episode.use == "mask" for episode in episodes])
    for cause in CAUSES:
        columns[f"cause/{cause}"] = column([episode.cause == cause for episode in episodes])
    for name in sorted({(each.environment, metric) for each in episodes for metric in each.metrics}):
        columns["/".join(name)] = column([
            each.metrics.get(name[1], np.nan) if each.environment == name[0] else np.nan for each in episodes])
    return columns


def incomplete(columns: Mapping[str, NDArray[np.float32]]) -> list[str | None] | None:
    """[S] why each episode of some `episode_numbers` did not complete: "error_timeout, masked"; None for one that
    did, and for all if there are no episodes."""
    if not columns:
        return None
    reasons: list[str | None] = []
    for i, masked in enumerate(columns["masked"]):
        cause = next(cause for cause in CAUSES if columns[f"cause/{cause}"][i])
        reasons.append(None if cause == "completed" else f"{cause}, masked" if masked else cause)
    return reasons


def episode_metrics(parts: Sequence[Mapping[str, NDArray[np.float32]]]) -> dict[str, float]:
    """Means over all episodes of some `episode_numbers`, under "episodes/": those that have a number count. Causes are
    shares of the episodes; one that did not occur is left out."""
    names = dict.fromkeys(name for part in parts for name in part)
    sizes = [len(part["turns"]) for part in parts if part]
    metrics = {}
    for name in names:
        columns = [part.get(name, np.full(size, np.nan)) for part, size in zip(filter(None, parts), sizes, strict=True)]
        numbers = np.concatenate(columns)
        numbers = numbers[~np.isnan(numbers)]
        if len(numbers) and not (name.startswith("cause/") and not numbers.any()):
            metrics[f"episodes/{name}"] = float(numbers.mean())
    return metrics
