"""The row of metrics of one step, from summaries and statistics."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlhf_ray.algorithms.dynamic_sampling import scores_differ
from rlhf_ray.algorithms.logprob_gap import gap_quantile
from rlhf_ray.coordinator.weight_sync import Published
from rlhf_ray.observability.bottleneck import PHASES, PUBLISH, waiting_shares
from rlhf_ray.observability.spans import StepClock, timeline
from rlhf_ray.records import ExperienceSummary, UpdateStats
from rlhf_ray.replay.chunk import BufferStats, Chunk
from rlhf_ray.roles.episode_numbers import episode_metrics


def mean_kl(summaries: Sequence[ExperienceSummary]) -> float | None:
    """Mean sequence KL of a batch in nats; None without a reference, NaN if all its samples are masked."""
    each = [s.kl for s in summaries if s.kl is not None]
    return mean(np.concatenate(each)) if each else None


def mean(numbers: np.ndarray) -> float:
    """Mean of those that are not NaN, as those of masked episodes are; NaN without any."""
    counted = numbers[~np.isnan(numbers)]
    return float(counted.mean()) if len(counted) else math.nan


def deviation(numbers: np.ndarray) -> float:
    """Standard deviation (n) likewise."""
    counted = numbers[~np.isnan(numbers)]
    return float(counted.std()) if len(counted) else math.nan


@dataclass(frozen=True)
class Drawn:
    """What dynamic sampling drew for a batch."""

    filtered: Mapping[str, Sequence[float]]
    """Scores of the samples that were filtered, by the names of `RewardScores.numbers`."""
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], samples_per_prompt: int, components: Sequence[str] = ()) -> "Drawn":
        """What was drawn for the chunks of a batch.

        Args:
            components: those of the scores, if the estimator compares each by itself; empty if it compares their sum.
        """
        names = dict.fromkeys(name for chunk in chunks for name in chunk.filtered)
        filtered = {name: [score for chunk in chunks for score in chunk.filtered.get(name, ())] for name in names}
        summaries = [chunk.summary for chunk in chunks]
        columns = [np.concatenate([s.components[name] for s in summaries]) for name in components]
        compared = np.stack(columns or [np.concatenate([s.scores for s in summaries])], axis=-1)
        groups = torch.arange(len(compared)) // samples_per_prompt
        differ = scores_differ(torch.from_numpy(compared), groups)[::samples_per_prompt]
        gone = len(filtered.get("score", ())) // samples_per_prompt
        return cls(filtered, {
            "dynamic/drawn_per_kept": (len(differ) + gone) / len(differ),
            "dynamic/filtered": float(gone),
            "dynamic/filled": float((~differ).sum()),
        })


@dataclass(frozen=True)
class StepOutcome:
    """The results of one step."""

    summaries: Sequence[ExperienceSummary]
    policy: UpdateStats | None
    """None while only the critic warms up."""
    critic: UpdateStats | None
    """None without a critic."""
    trained_version: int
    """Version the update started from."""
    kl_coef: float
    """KL coefficient in the batch's token rewards."""
    published: Published
    bytes_received: int
    """Bytes from workers to this process during the step."""
    faults: Mapping[str, float]
    """Metrics of lost workers."""
    began: float
    ended: float
    """Seconds of the step clock."""
    save_pause: float | None = None
    """Seconds for which training paused before the step to copy the state for a checkpoint; None without one."""
    canary: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last comparison of generators and learner: after the publication before this step's."""
    drawn: Drawn | None = None
    """With dynamic sampling."""


def step_metrics(
    outcome: StepOutcome, depth: BufferStats, clock: StepClock, workers: Mapping[str, int], sections: Collection[str]
) -> dict[str, float]:
    """Flat metrics by name.

    Args:
        depth: the buffer when the update began.
        workers: number of workers by role.
        sections: of the roles that the run has.
    """
    seconds = outcome.ended - outcome.began
    samples = sum(len(s.scores) for s in outcome.summaries)
    metrics = {
        **_experience_metrics(outcome.summaries, outcome.trained_version,
                              outcome.drawn.filtered if outcome.drawn else {}),
        **(outcome.drawn.metrics if outcome.drawn else {}),
        "kl/coef": outcome.kl_coef,
        "weights/publish_seconds": outcome.published.seconds,
        "weights/pause_seconds": outcome.published.pause_seconds,
        "weights/published_mb": outcome.published.nbytes / 2**20,
        "weights/version": float(outcome.trained_version + 1),
        "buffer/samples": float(depth.samples_ready + depth.samples_leased),
        "buffer/mb": depth.bytes / 2**20,
        "throughput/samples_per_second": samples / seconds,
        "throughput/tokens_per_second": sum(s.tokens for s in outcome.summaries) / seconds,
        "coordinator/bytes_per_sample": outcome.bytes_received / samples,
        **outcome.canary,
        **outcome.faults,
        "time/step": seconds,
    }
    if outcome.save_pause is not None:
        metrics["checkpoint/pause_seconds"] = outcome.save_pause
    for name, stats in (("policy", outcome.policy), ("critic", outcome.critic)):
        if stats is not None:
            metrics.update({f"{name}/{key}": value for key, value in stats.metrics.items()})
            metrics[f"{name}/skipped_steps"] = float(stats.skipped)
    for name in ("logprob_gap", "logprob_gap_p99"):
        if f"policy/{name}" in metrics:  # measured in the update if no separate pass did
            metrics[f"rollout/{name}"] = metrics.pop(f"policy/{name}")
    if mean_kl(outcome.summaries) is not None:  # the policy computes the reference's log-probabilities, or scorers do
        sections = {*sections, "reference"}
    phases = [*(phase for phase, section in PHASES.items() if section in sections), PUBLISH]
    spans = clock.work(outcome.began, outcome.ended)
    line = timeline(spans, outcome.began, outcome.ended, [f"phase:{p}" for p in phases])
    metrics.update({f"time/{p}": float(line.seconds[line.busy[f"phase:{p}"] > 0].sum()) for p in phases})
    shares = waiting_shares(spans, outcome.began, outcome.ended, workers)
    metrics.update({f"share/{role}/{name}": share for role, its in shares.items() for name, share in its.items()})
    return metrics


def _experience_metrics(summaries: Sequence[ExperienceSummary], trained_version: int,
                        filtered: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of the batch; `filtered` samples count in the means of scores, which would else follow from what is kept."""
    def drawn(name: str, columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([*columns, np.asarray(filtered.get(name, ()), np.float32)])

    scores = drawn("score", [s.scores for s in summaries])
    staleness = np.array([trained_version - s.min_version for s in summaries])
    kl = mean_kl(summaries)
    metrics = {
        "reward/mean": mean(scores),
        "reward/std": deviation(scores),
        **({} if kl is None else {"kl/sequence": kl}),
        "response/length": float(np.concatenate([s.response_lengths for s in summaries]).mean()),
        "response/finished": float(np.concatenate([s.finished for s in summaries]).mean()),
        "rollout/logprob_gap": float(np.average([s.behaviour_gap for s in summaries],
                                                weights=[s.response_lengths.sum() for s in summaries])),
        "rollout/logprob_gap_p99": gap_quantile(np.sum([s.gap_histogram for s in summaries], 0), 0.99),
        "staleness/max": float(staleness.max()),
        "staleness/mean": float(staleness.mean()),
    }
    for name in summaries[0].components:
        component = drawn(f"reward/{name}", [s.components[name] for s in summaries])
        metrics[f"reward/component/{name}"] = mean(component)
        metrics[f"reward/component/{name}/std"] = deviation(component)
        metrics[f"reward/failures/{name}"] = sum(s.failures.get(name, 0) for s in summaries) / len(component)
    for kind in sorted({name for s in summaries for name in s.failures if "/" in name}):
        metrics[f"reward/failed_tries/{kind}"] = float(sum(s.failures.get(kind, 0) for s in summaries))
    metrics |= episode_metrics([s.episodes for s in summaries])
    gold = [s.gold for s in summaries if s.gold is not None]
    return {**metrics, "reward/gold": mean(drawn("gold", gold))} if gold else metrics
