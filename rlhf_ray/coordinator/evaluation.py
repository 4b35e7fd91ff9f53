"""The policy on prompts it never trained on: the same prompts, the same seeds, before, during and after training."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_ray.config.loop import EvaluationConfig
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.records import EvaluationPart, SampleKey

TEXTS = 8
"""Responses kept as text."""


@dataclass(frozen=True)
class Evaluation:
    """One measurement."""

    metrics: dict[str, float]
    texts: list[dict[str, str]]


class Evaluator:
    """Generates a response to every held-out prompt and sums up what the scorers and the judge say."""

    def __init__(self, config: EvaluationConfig, pipeline: Pipeline, prompts: Any, rows: int) -> None:
        self.config, self._pipeline, self._prompts = config, pipeline, prompts
        self.rows = rows
        self._keys = [SampleKey(0, row, 0) for row in range(rows)]

    async def measure(self) -> Evaluation:
        """Evaluate the policy that the generators hold now."""
        size = self._pipeline.config.generator.chunk
        chunks = [self._keys[i : i + size] for i in range(0, len(self._keys), size)]
        parts = await asyncio.gather(*(self._part(chunk, TEXTS if i == 0 else 0) for i, chunk in enumerate(chunks)))
        return Evaluation(summarise(parts), [text for part in parts for text in part.texts])

    async def _part(self, keys: list[SampleKey], keep_texts: int) -> EvaluationPart:
        scored = await self._pipeline.score(keys, self.config.seed, self._prompts)
        call = self._pipeline.team.assembler.call(
            0, "measure", keep_texts, scored.rollout.ref, scored.reward.ref, scored.reference.ref
        )
        return await self._pipeline.team.value(call, "evaluate")


def summarise(parts: list[EvaluationPart]) -> dict[str, float]:
    """Means over all responses.

    Perplexity is under the reference: exp of minus the mean log-probability per response token. `distinct` is the share
    of different responses, `distinct_bigrams` that of different pairs of neighbouring tokens among all pairs.
    """
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    lengths, digests, bigrams = joined("lengths"), joined("digests"), joined("bigrams")
    metrics = {
        "reward": float(joined("scores").mean()),
        "kl": float(joined("kl").mean()),
        "perplexity": float(np.exp(-joined("reference_logprobs").sum() / lengths.sum())),
        "length": float(lengths.mean()),
        "finished": float(joined("finished").mean()),
        "distinct": len(np.unique(digests)) / len(digests),
        "distinct_bigrams": len(np.unique(bigrams)) / max(1, len(bigrams)),
        "responses": float(len(lengths)),
    }
    return metrics if parts[0].gold is None else {**metrics, "gold": float(joined("gold").mean())}
