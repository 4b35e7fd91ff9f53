"""Evaluation of the policy on held-out prompts: always the same prompts and the same seeds."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from rlhf_ray.config.derived import Derived
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.chunk_calls import ENDING_S, ChunkCalls, Columns
from rlhf_ray.coordinator.episode_journals import EpisodeJournals
from rlhf_ray.coordinator.rollout_source import EpisodeSource, PromptSource, RolloutSource, chunks_at_a_time
from rlhf_ray.errors import RewardError, UnscoredSamples
from rlhf_ray.records import EvaluationPart, SampleKey
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.workers.calls import Call
from rlhf_ray.workers.dispatcher import retry_on_lost_object
from rlhf_ray.workers.role_groups import RoleGroups

T = TypeVar("T")
TEXTS = 8
"""Responses kept as text."""


@dataclass(frozen=True)
class Measured:
    """A chunk of held-out samples that was measured."""

    part: Call[EvaluationPart]
    chunk: Chunk
    columns: Columns
    """Of `ChunkCalls.score`."""


@dataclass(frozen=True)
class Evaluation:
    """One measurement."""

    metrics: dict[str, float]
    texts: list[dict[str, Any]]
    """Some responses: prompt, response, and messages of a prompt that is a conversation."""
    chunks: tuple[Measured, ...] = ()
    """All chunks, if the evaluator keeps them; what roles computed for them stays in the object store meanwhile."""


class Evaluator:
    """Generates responses to every held-out prompt and aggregates their scores.

    Responses are sampled with `evaluation.sampling`. If that is not the distribution under training, no KL is reported:
    the generators' log-probabilities are not the policy's then.

    With `reward.on_failure: quarantine`, a held-out prompt with a response without a score is left out of this
    evaluation with all its responses, with a warning, and counted as `unscored`.
    """

    def __init__(self, config: PPOConfig, derived: Derived, roles: RoleGroups, calls: ChunkCalls,
                 prompts: PromptSource, warn: Callable[[str], None] = lambda _: None, keeps_chunks: bool = False,
                 advanced: Callable[[int], None] = lambda _: None, journals: EpisodeJournals | None = None) -> None:
        """
        Args:
            config: has a section `evaluation`.
            keeps_chunks: whether an `Evaluation` has its chunks.
            advanced: called with the number of samples that were measured since the last call.
            journals: of episodes, if those of an evaluation are to go on after the loss of their runner.
        """
        assert config.evaluation is not None
        self._config = config
        self._evaluation = config.evaluation
        self._derived = derived
        self._roles = roles
        self._calls = calls
        self._warn = warn
        self._keeps_chunks = keeps_chunks
        self._advanced = advanced
        self._rollouts = RolloutSource(roles.dispatcher(roles.generators), prompts, self._evaluation.seed,
                                       self._evaluation.sampling,
                                       EpisodeSource.of(config, roles, held_out=True, journals=journals))
        self.rows = prompts.rows
        self._slots = self._present_slots()
        # First samples first, so that the texts that are kept are for different prompts.
        self._keys = [SampleKey(0, row, n) for n in range(self._evaluation.samples_per_prompt)
                      for row in prompts.numbers]

    async def measure(self) -> Evaluation:
        """Evaluate the policy that the generators hold now.

        Raises:
            RewardError: no held-out prompt has a score, or one has none and may not be left out.
        """
        self._slots = self._present_slots()
        return await retry_on_lost_object(self._measure, self._config.cluster.max_restarts)

    async def _measure(self) -> Evaluation:
        config = self._config
        roles = self._roles
        size = config.generator.chunk
        chunks = [self._keys[i : i + size] for i in range(0, len(self._keys), size)]
        measured, unscored = await self._measured(chunks)
        refs = (each.part.ref for each in measured)
        metrics, texts = await roles.dispatcher(roles.assembler).value(
            Assembler.sum_up, self._derived.evaluates_the_policy_itself, self._derived.solved_at,
            self._derived.solved_by, *refs,
            phase="evaluate")
        if config.reward.on_failure == "quarantine":
            metrics["unscored"] = float(unscored)
        return Evaluation(metrics, texts, tuple(measured) if self._keeps_chunks else ())

    def _present_slots(self) -> asyncio.Semaphore:
        """A slot for each chunk that the present generators can process concurrently."""
        return asyncio.Semaphore(chunks_at_a_time(self._config.generator, len(self._roles.generators)))

    async def _measured(self, chunks: list[list[SampleKey]]) -> tuple[list[Measured], int]:
        """Every chunk, measured, and the number of prompts that are in none of them any more. A chunk with a prompt
        that turns out to have no score, here or elsewhere, is measured again without it."""
        parts: dict[int, Measured] = {}
        left_out: dict[int, str] = {}
        while waiting := [i for i, chunk in enumerate(chunks) if chunk and i not in parts]:
            found = await self._all([self._part(chunks[i], TEXTS if i == 0 else 0) for i in waiting])
            failed = {s.key.row: s.reason for part in found if isinstance(part, UnscoredSamples) for s in part.samples}
            parts |= {i: part for i, part in zip(waiting, found, strict=True)
                      if not isinstance(part, UnscoredSamples)}
            for i, chunk in enumerate(chunks):
                if not failed.keys().isdisjoint(key.row for key in chunk):
                    chunks[i] = [key for key in chunk if key.row not in failed]
                    parts.pop(i, None)
            left_out |= failed
        self._report(left_out)
        return [part for _, part in sorted(parts.items())], len(left_out)

    def _report(self, left_out: dict[int, str]) -> None:
        for row, reason in sorted(left_out.items()):
            self._warn(f"the held-out prompt of row {row} is left out of the evaluation: a response to it has no "
                       f"score: {reason}")
        if len(left_out) == self.rows:
            raise RewardError(f"none of the {self.rows} held-out prompts has a score. The first reason: "
                              f"{left_out[min(left_out)]}")

    async def _all(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Results of all parts. When one fails, or a stop is requested, the others are cancelled, and end at the
        workers, which are needed elsewhere. One that hangs is not waited for longer than `ENDING_S`."""
        parts = [asyncio.ensure_future(part) for part in work]
        try:  # if this is cancelled, a gather would wait until every part has ended
            await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
            failed = [part for part in parts if part.done() and (part.cancelled() or part.exception())]
            return [part.result() for part in failed or parts]
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts, timeout=ENDING_S)

    async def _part(self, keys: list[SampleKey], keep_texts: int) -> Measured | UnscoredSamples:
        """One chunk, measured (what was measured stays in the object store), or which of its samples have no score."""

        times = count()

        async def measured() -> Measured:
            chunk = Chunk.outside(keys)
            await self._rollouts.generate(chunk, repeated=next(times) > 0)
            columns = await self._calls.score([chunk], held_out=True)
            part = await self._roles.dispatcher(self._roles.assembler).call(
                Assembler.measure, keep_texts, chunk.rollout, columns["rewards"], columns.get("reference"),
                chunk.prompts if keep_texts else None, phase="evaluate")
            self._advanced(len(keys))
            return Measured(part, chunk, columns)

        async with self._slots:  # deadlines run from the call on, so a long queue must wait here
            try:
                return await retry_on_lost_object(measured, self._config.cluster.max_restarts)
            except UnscoredSamples as error:
                return error
