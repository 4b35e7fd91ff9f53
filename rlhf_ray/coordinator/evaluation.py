"""The policy on prompts it never trained on: the same prompts, the same seeds, before, during and after training."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_ray.cluster.calls import Call
from rlhf_ray.config.loop import EvaluationConfig
from rlhf_ray.coordinator.crew import kept
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.prompt_source import PromptSource
from rlhf_ray.records import SampleKey

TEXTS = 8
"""Responses kept as text."""


@dataclass(frozen=True)
class Evaluation:
    """One measurement."""

    metrics: dict[str, float]
    texts: list[dict[str, str]]


class Evaluator:
    """Generates responses to every held-out prompt and sums up what the scorers and the judge say.

    Responses are drawn as `evaluation.sampling` says. Where that is not the distribution under training, no KL is told:
    the generators' log-probabilities are not the policy's then.
    """

    def __init__(self, config: EvaluationConfig, pipeline: Pipeline, prompts: PromptSource) -> None:
        self.config, self._pipeline, self._prompts = config, pipeline, prompts
        self.rows = prompts.rows
        generator = pipeline.config.generator
        self._room = asyncio.Semaphore(generator.workers * max(2, 2 * generator.max_sequences // generator.chunk))
        # First samples first: the texts that are kept answer different prompts.
        self._keys = [SampleKey(0, row, n) for n in range(config.samples_per_prompt) for row in range(prompts.rows)]

    async def measure(self) -> Evaluation:
        """Evaluate the policy that the generators hold now."""
        config = self._pipeline.config
        size = config.generator.chunk
        chunks = [self._keys[i : i + size] for i in range(0, len(self._keys), size)]
        parts = await self._all([self._part(chunk, TEXTS if i == 0 else 0) for i, chunk in enumerate(chunks)])
        team = self._pipeline.team
        refs = (part.ref for part in parts)
        _, (metrics, texts) = await team.crew(team.assembler).ask_for(
            0, "sum_up", config.evaluates_the_policy_itself, config.solved_at, *refs, phase="evaluate")
        return Evaluation(metrics, texts)

    async def _all(self, work: Sequence[Coroutine[Any, Any, Call]]) -> list[Call]:
        """What all parts give. When one fails, none goes on: others are about to need the workers."""
        parts = [asyncio.ensure_future(part) for part in work]
        try:
            return await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()

    async def _part(self, keys: list[SampleKey], keep_texts: int) -> Call:
        """One chunk, measured; what was measured stays in the object store."""
        team = self._pipeline.team

        async def measured() -> Call:
            scored = await self._pipeline.route.score(keys, self.config.seed, self._prompts, self.config.sampling)
            return await team.crew(team.assembler).ask(
                "measure", keep_texts, *scored.rollouts, scored.reward, scored.reference, phase="evaluate")

        async with self._room:  # deadlines run from the call on, so a long queue must wait here
            return await kept(measured, self._pipeline.config.cluster.max_restarts)
