"""What one finished run came to, read from its directory, and what several seeds came to together."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from rlhf_ray.observability.metrics import read_metrics

WINDOW = 3
"""Steps over which the gold score of a batch (128 responses) is averaged before it is compared with `TARGET`."""
TARGET = 0.8
DISTINCT = 0.9
"""Share of different responses below which a policy says the same again and again, which is not learning."""


@dataclass(frozen=True)
class Outcome:
    """One estimator with one seed. Gold, KL and shares are of 512 held-out prompts; curves of the training batches."""

    estimator: str
    seed: int
    gold_before: float
    gold_after: float
    kl_before: float
    kl_after: float
    """Nats a response."""
    distinct: float
    """Share of different responses."""
    distinct_bigrams: float
    """Different pairs of neighbouring tokens over all pairs."""
    seconds: float
    """Of the loop, both evaluations included; starting the workers is not."""
    samples: list[int]
    """Samples made up to and including each step."""
    gold: list[float]
    """Mean gold score of each step's batch."""
    kl: list[float]
    """Mean KL of each step's responses, nats."""

    @property
    def samples_to_target(self) -> int | None:
        """Samples made until the mean gold of `WINDOW` batches reached `TARGET`; None: never."""
        recent = trailing_means(self.gold, WINDOW)
        return next((n for n, gold in zip(self.samples, recent, strict=True) if gold >= TARGET), None)

    @property
    def learned(self) -> bool:
        """Whether the judge is content with responses that are not one phrase."""
        return self.gold_after >= TARGET and self.distinct >= DISTINCT


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation of one number over seeds; deviation 0 for one seed."""

    mean: float
    deviation: float


def read_outcome(estimator: str, seed: int, directory: Path) -> Outcome:
    """The outcome of a finished run."""
    summary = json.loads((directory / "summary.json").read_text())
    evaluation = json.loads((directory / "evaluation.json").read_text())
    before, after = evaluation["before"], evaluation["after"]
    steps = [row for row in read_metrics(directory) if "reward/gold" in row]
    per_step = summary["samples"] // summary["steps"]
    return Outcome(
        estimator=estimator, seed=seed, gold_before=before["gold"], gold_after=after["gold"], kl_before=before["kl"],
        kl_after=after["kl"], distinct=after["distinct"], distinct_bigrams=after["distinct_bigrams"],
        seconds=summary["seconds_loop"], samples=[row["step"] * per_step for row in steps],
        gold=[row["reward/gold"] for row in steps], kl=[row["kl/sequence"] for row in steps],
    )


def trailing_means(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it; infinitely low until there are `window` values."""
    return [mean(values[i - window + 1 : i + 1]) if i + 1 >= window else float("-inf") for i in range(len(values))]


def spread(outcomes: Sequence[Outcome], number: Callable[[Outcome], float]) -> Spread:
    """Mean and deviation of a number over the outcomes of several seeds."""
    values = [number(o) for o in outcomes]
    return Spread(mean(values), stdev(values) if len(values) > 1 else 0.0)
