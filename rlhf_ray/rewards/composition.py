"""Several sources as one reward: asked side by side, weighed and added up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_ray.records import RewardScores
from rlhf_ray.rewards.answers import checked, finite_scores
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, RewardSource


class WeightedSum:
    """Named sources, each with its weight."""

    def __init__(self, sources: Mapping[str, tuple[float, RewardSource]]) -> None:
        self._sources = dict(sources)

    async def start(self) -> dict[str, float]:
        """Start all sources side by side; the largest of each of the numbers that they give. The first failure is
        raised once all have ended."""
        told = await _all(*(source.start() for _, source in self._sources.values()))
        largest: dict[str, float] = {}
        for name, number in ((name, number) for numbers in told for name, number in (numbers or {}).items()):
            largest[name] = max(number, largest.get(name, number))
        return largest

    async def score(self, requests: Sequence[RewardRequest]) -> RewardScores:
        """The weighted sum and its components.

        Raises:
            RewardError: a source failed, or answered otherwise than agreed, or the sum is beyond float32. What the
                others said is not used.
        """
        answers: list[RewardAnswer] = await _all(*(source.score(requests) for _, source in self._sources.values()))
        named = {name: checked(a, requests, name) for name, a in zip(self._sources, answers, strict=True)}
        weights = {name: weight for name, (weight, _) in self._sources.items()}
        dense = [weights[name] * a.token_rewards.astype(np.float64) for name, a in named.items()
                 if a.token_rewards is not None]
        total = sum((weights[name] * a.scores.astype(np.float64) for name, a in named.items()),
                    np.zeros(len(requests)))
        return RewardScores(
            scores=finite_scores(total, requests, "the weighted sum of rewards", "lower their weights"),
            components={name: a.scores for name, a in named.items()},
            failures=_failures(named),
            token_rewards=np.sum(dense, axis=0).astype(np.float32) if dense else None,
        )

    async def stop(self) -> None:
        """Stop all sources, whatever state they are in."""
        await asyncio.gather(*(source.stop() for _, source in self._sources.values()), return_exceptions=True)


def _failures(answers: Mapping[str, RewardAnswer]) -> dict[str, int]:
    """Component -> requests that were not judged in the ordinary way; component/kind -> how often that went wrong."""
    kinds = {f"{name}/{kind}": count for name, a in answers.items() for kind, count in a.failure_kinds.items()}
    return {name: a.failures for name, a in answers.items()} | kinds


async def _all(*calls: object) -> list[Any]:
    """Results in order. Every call is awaited to its end, so that none goes on after a failure was told."""
    results = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[call-overload]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
