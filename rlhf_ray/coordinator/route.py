"""The way of one chunk through the roles: generated, scored by the frozen models, by the learners, assembled."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_ray.cluster.calls import Call
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.gathering import Answer, Gathering
from rlhf_ray.coordinator.prompt_source import PromptSource
from rlhf_ray.coordinator.team import Rotation, Team
from rlhf_ray.records import ExperienceSummary, RewardTerms, SampleKey


@dataclass(frozen=True)
class Scored:
    """References to what the roles said about one rollout."""

    rollout: Call
    reference: Call | Answer
    reward: Call


class Route:
    """Calls the roles for one chunk after the other, any number of chunks at a time. Keeps no chunk's state."""

    def __init__(self, config: PPOConfig, team: Team) -> None:
        self.config, self.team = config, team
        self._generators = Rotation(team.generators)
        self._reference = Rotation(team.reference) if team.reference is not None else None
        self._together = None
        if team.reference is not None and config.coordinator.max_staleness:
            self._together = Gathering(team, team.reference, "logprobs", "reference")
        self._reward, self._assembler = Rotation(team.reward), Rotation(team.assembler)
        self._learners_free = asyncio.Event()
        self._learners_free.set()

    @contextmanager
    def forward_passes_held(self) -> Iterator[None]:
        """Hold the learners' forward passes back meanwhile; they are made when the enclosed work is over.

        A learner serves one call at a time. Passes for chunks that finish during an update would wait for its end in
        any case, and come before the new weights are gathered: generators would wait for passes that are in no hurry.
        """
        self._learners_free.clear()
        try:
            yield
        finally:
            self._learners_free.set()

    async def score(
        self, keys: list[SampleKey], seed: int, source: PromptSource, sampling: SamplingConfig | None = None
    ) -> Scored:
        """Generate a chunk and have it scored by the frozen models; `sampling` as in training if None."""
        return await self.rate(*await self.generate(keys, seed, source, sampling))

    async def generate(
        self, keys: list[SampleKey], seed: int, source: PromptSource, sampling: SamplingConfig | None
    ) -> tuple[Call, Any]:
        """A chunk's rollout, and the reference to its prompts."""
        prompts = (await source.of(keys)).ref
        rank = self._generators.take(len(keys))
        try:
            call = self.team.generators.call(rank, "generate", prompts, keys, seed, sampling)
            return await self.team.done(call, "generate"), prompts
        finally:
            self._generators.give_back(rank, len(keys))

    async def rate(self, rollout: Call, prompts: Any) -> Scored:
        """What the frozen models say, side by side."""
        reference, reward = await asyncio.gather(
            self._ask_reference(rollout.ref),
            self._ask(self._reward, "reward", "score", rollout.ref, prompts),
        )
        return Scored(rollout, reference, reward)

    async def assemble(
        self, scored: Scored, terms: Callable[[], RewardTerms], texts: int
    ) -> tuple[Any, ExperienceSummary]:
        """The reference to a chunk's experience, and the small numbers about it.

        Args:
            terms: gives the numbers of the run that enter the rewards; asked when all scores are there.
            texts: rows to return as text.
        """
        team, rollout = self.team, scored.rollout.ref
        logprobs, values = await self._ask_learners(rollout)
        rank = self._assembler.take(1)
        try:
            call = team.assembler.call(
                rank, "assemble", terms(), texts, len(logprobs), rollout, scored.reward.ref, scored.reference.ref,
                *logprobs, *values, outputs=2,
            )
            summary = await team.value(call, "assemble", 1)
        finally:
            self._assembler.give_back(rank, 1)
        return call.ref, summary

    async def _ask_learners(self, rollout: Any) -> tuple[list[Any], list[Any]]:
        """References to each policy rank's log-probabilities, and to each critic rank's values (none without one)."""
        await self._learners_free.wait()
        team = self.team
        if self.config.shares_backbone:
            both = [team.policy.call(rank, "logprobs_and_values", rollout, outputs=2)
                    for rank in range(len(team.policy))]
            await asyncio.gather(*(team.done(call, "logprobs") for call in both))
            return [call.refs[0] for call in both], [call.refs[1] for call in both]
        logprobs = team.policy.call_all("logprobs", rollout)
        values = team.critic.call_all("values", rollout) if team.critic else []
        await asyncio.gather(*(team.done(c, "logprobs") for c in logprobs), *(team.done(c, "values") for c in values))
        return [call.ref for call in logprobs], [call.ref for call in values]

    async def _ask_reference(self, rollout: Any) -> Call | Answer:
        """The reference's log-probabilities: from its own workers, in company where timing may choose it, or from the
        policy's frozen base, rank by rank."""
        if self._together is not None:
            return await self._together.ask(rollout)
        if self._reference is not None:
            return await self._ask(self._reference, "reference", "logprobs", rollout)
        await self._learners_free.wait()
        shares = self.team.policy.call_all("reference_logprobs", rollout)
        await asyncio.gather(*(self.team.done(call, "reference") for call in shares))
        if len(shares) == 1:
            return shares[0]
        return await self._ask(self._assembler, "assemble", "join", *(call.ref for call in shares))

    async def _ask(self, rotation: Rotation, phase: str, method: str, *refs: Any) -> Call:
        rank = rotation.take(1)
        try:
            return await self.team.done(rotation.group.call(rank, method, *refs), phase)
        finally:
            rotation.give_back(rank, 1)
