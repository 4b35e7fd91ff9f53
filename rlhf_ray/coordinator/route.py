"""The way of chunks through the roles: generated, scored by the frozen models, by the learners, assembled.

A chunk is generated alone. Afterwards each call is for one chunk or for several in company, and so is its failure: it
is raised to all of them, by the call's own worker, role and method, before any later call of theirs is made.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_ray.cluster.calls import Call
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.prompt_source import Prompter
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.errors import WorkerLost
from rlhf_ray.records import ExperienceSummary, RewardTerms, SampleKey


@dataclass(frozen=True)
class Generated:
    """A chunk's rollout, and the reference to the prompts that it answers."""

    rollout: Call
    prompts: Any


@dataclass(frozen=True)
class Scored:
    """What the frozen models said about some rollouts, one object a call."""

    rollouts: list[Any]
    """References."""
    reference: Any
    """Reference to the log-probabilities of all their rows."""
    reward: Any
    """Reference to a list with the rewards of each."""


class Route:
    """Calls the roles for chunk after chunk, any number of them at a time. Keeps no chunk's state."""

    def __init__(self, config: PPOConfig, roles: RoleGroups) -> None:
        self.config, self.roles = config, roles
        self._generators = roles.dispatcher(roles.generators)
        self._reference = roles.dispatcher(roles.reference) if roles.reference is not None else None
        self._reward, self._assembler = roles.dispatcher(roles.reward), roles.dispatcher(roles.assembler)
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
        self, keys: list[SampleKey], seed: int, source: Prompter, sampling: SamplingConfig | None = None
    ) -> Scored:
        """Generate a chunk and have it scored by the frozen models; `sampling` as in training if None."""
        return await self.rate([await self.generate(keys, seed, source, sampling)])

    async def generate(
        self, keys: list[SampleKey], seed: int, source: Prompter, sampling: SamplingConfig | None,
        again: Callable[[WorkerLost], None] | None = None,
    ) -> Generated:
        """One chunk. `again` is told of each generator that was lost with it."""
        prompts = await source.of(keys)
        return Generated(
            await self._generators.call("generate", prompts, keys, seed, sampling, phase="generate", work=len(keys),
                                      again=again), prompts)

    async def rate(self, chunks: Sequence[Generated]) -> Scored:
        """What the frozen models say, side by side."""
        rollouts, prompts = [chunk.rollout.ref for chunk in chunks], [chunk.prompts for chunk in chunks]
        reference, reward = await asyncio.gather(
            self._call_reference(rollouts), self._reward.call("score_each", *rollouts, *prompts, phase="reward"))
        return Scored(rollouts, reference, reward.ref)

    async def assemble(
        self, scored: Scored, terms: Callable[[], RewardTerms], texts: Sequence[int]
    ) -> list[tuple[Any, ExperienceSummary]]:
        """Of each chunk the reference to its experience, and the small numbers about it.

        Args:
            terms: gives the numbers of the run that enter the rewards; asked when all scores are there.
            texts: rows of each chunk to return as text.
        """
        logprobs, values = await self._ask_learners(scored.rollouts)
        chunks = len(scored.rollouts)
        call, summaries = await self._assembler.call_and_get(
            chunks, "assemble_each", terms(), list(texts), len(logprobs), *scored.rollouts, scored.reward,
            scored.reference, *logprobs, *values, phase="assemble", outputs=chunks + 1)
        return list(zip(call.refs, summaries, strict=False))

    async def _ask_learners(self, rollouts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """References to each policy rank's log-probabilities (none where no pass is made for them), and to each critic
        rank's values (none without one)."""
        roles, passes = self.roles, self.config.old_logprobs == "policy"
        if passes or roles.critic:
            await self._learners_free.wait()
        if self.config.shares_backbone:
            both = [roles.policy.call(rank, "logprobs_and_values", *rollouts, outputs=2)
                    for rank in range(len(roles.policy))]
            await self._all_ranks(both, "logprobs")
            return [call.refs[0] for call in both], [call.refs[1] for call in both]
        logprobs = roles.policy.call_all("logprobs", *rollouts) if passes else []
        values = roles.critic.call_all("values", *rollouts) if roles.critic else []
        await asyncio.gather(self._all_ranks(logprobs, "logprobs"), self._all_ranks(values, "values"))
        return [call.ref for call in logprobs], [call.ref for call in values]

    async def _call_reference(self, rollouts: Sequence[Any]) -> Any:
        """Reference to the reference's log-probabilities: from its own workers, or from the policy's frozen base, rank
        by rank."""
        if self._reference is not None:
            return (await self._reference.call("logprobs", *rollouts, phase="reference")).ref
        await self._learners_free.wait()
        shares = self.roles.policy.call_all("reference_logprobs", *rollouts)
        await self._all_ranks(shares, "reference")
        if len(shares) == 1:
            return shares[0].ref
        return (await self._assembler.call("join", *(call.ref for call in shares), phase="assemble")).ref

    async def _all_ranks(self, calls: Sequence[Call], phase: str) -> None:
        """Wait for the same call to every rank of a learner.

        Raises:
            WorkerLost: one was lost. Where there are several ranks it is one, too, whose copy of an argument was lost:
                the others made the pass, and wait for each other's collectives at another place from then on.
        """
        try:
            await asyncio.gather(*(self.roles.done(call, phase) for call in calls))
        except WorkerLost as error:
            if error.kind == "result" and len(calls) > 1:
                error.kind = "broke"
            raise
