"""From prompt keys to committed experience: admission, and the way of one chunk through the roles.

Every chunk travels on its own: it is scored as soon as it is generated, while others are still being generated. What is
in a chunk and in which order chunks form a batch is fixed at admission, so at max_staleness 0 timing changes nothing
about the result.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from rlhf_ray.cluster.calls import Call
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.prompt_source import PromptSource
from rlhf_ray.coordinator.state import RunState
from rlhf_ray.coordinator.team import Rotation, Team
from rlhf_ray.errors import BufferError
from rlhf_ray.records import ExperienceSummary, SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.entries import CommitOutcome, Eviction, Lease, Reservation
from rlhf_ray.replay.freshness import AdmissionRule
from rlhf_ray.replay.ledger import Ledger


@dataclass(frozen=True)
class Scored:
    """References to what the roles said about one rollout."""

    rollout: Call
    reference: Call
    reward: Call


class Pipeline:
    """Keeps as many chunks under way as freshness and capacity allow, and hands out batches."""

    def __init__(self, config: PPOConfig, team: Team, state: RunState, buffer: ReplayBuffer,
                 prompts: PromptSource, ledger: Ledger) -> None:
        self.config, self.team, self.state, self.buffer, self.ledger = config, team, state, buffer, ledger
        self._prompts = prompts
        self._rule = AdmissionRule(config.samples_per_step, config.coordinator.max_staleness)
        self._generators = Rotation(team.generators)
        self._reference = Rotation(team.reference) if team.reference is not None else None
        self._reward, self._assembler = Rotation(team.reward), Rotation(team.assembler)
        self._running: dict[asyncio.Task[None], Reservation] = {}
        self._with_texts: set[int] = set()
        self.summaries: dict[int, ExperienceSummary] = {}
        """What is known of committed chunks, by admission number; the loop takes them out."""

    async def next_batch(self) -> Lease:
        """Wait until a whole batch is ready, admitting new work all the while. A chunk's first failure is raised."""
        while True:
            self.buffer.expire()
            self._admit()
            lease = self.buffer.lease(self.config.samples_per_step, self.state.step)
            if lease is not None:
                return lease
            if not self._running:
                raise BufferError(f"at step {self.state.step} {self.buffer.stats()} is no batch of "
                                  f"{self.config.samples_per_step} samples, and nothing is under way to fill it")
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._running.pop(task, None)
                task.result()

    def start_again(self, reservations: list[Reservation]) -> None:
        """Make the chunks of these places, which were under way when the run was saved."""
        self._with_texts.update(r.order for r in reservations[:1])
        for reservation in reservations:
            self._start(reservation, self.state.in_flight[reservation.order])

    def make_again(self, evictions: list[Eviction]) -> None:
        """Generate the samples of dropped entries anew; no prompt is lost because its experience grew too old."""
        for eviction in evictions:
            self.summaries.pop(eviction.entry.order, None)
            self.ledger.give_up(eviction.entry.keys, f"{eviction.staleness} versions old when the policy was renewed")
            self._start(self.buffer.reserve_again(eviction.entry.samples), list(eviction.entry.keys))

    async def close(self) -> None:
        """Drop what is under way."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    def _admit(self) -> None:
        """Start what freshness and capacity allow, and no more than the run's remaining steps will train on."""
        admitted = self.buffer.accepted + self.buffer.running
        allowance = self._rule.allowance(self.state.step, self.buffer.accepted, self.buffer.running)
        allowance = min(allowance, self.config.run.steps * self.config.samples_per_step - admitted)
        while allowance > 0:
            size, position = self._next_chunk()
            reservation = self.buffer.reserve(size)
            if reservation is None:
                return
            if position == 0:  # of each batch the first chunk gives the texts that are kept
                self._with_texts.add(reservation.order)
            self._start(reservation, self._next_keys(size))
            allowance -= size

    def _next_chunk(self) -> tuple[int, int]:
        """Samples of the next chunk and its place in its batch: full chunks, and a smaller last one, so that chunks add
        up to whole batches."""
        batch = self.config.samples_per_step
        position = (self.buffer.accepted + self.buffer.running) % batch
        return min(self.config.generator.chunk, batch - position), position

    def _next_keys(self, samples: int) -> list[SampleKey]:
        per_prompt = self.config.coordinator.samples_per_prompt
        rows = self.state.cursor.next(samples // per_prompt)
        return [SampleKey(epoch, row, sample) for epoch, row in rows for sample in range(per_prompt)]

    def _start(self, reservation: Reservation, keys: list[SampleKey]) -> None:
        self.state.in_flight[reservation.order] = keys
        self.ledger.lease(keys, self.state.step)
        task = asyncio.create_task(self._make(reservation, keys), name=f"chunk {reservation.order}")
        self._running[task] = reservation

    async def _make(self, reservation: Reservation, keys: list[SampleKey]) -> None:
        """One chunk from prompt to committed experience; made again when it came out too old for the bound."""
        while True:
            rollout, prompts = await self._generate(keys, self.config.run.seed, self._prompts, None)
            self.ledger.generated(keys, rollout.worker)
            scored = await self._rate(rollout, prompts)
            texts = self.config.logging.samples_per_step if reservation.order in self._with_texts else 0
            ref, summary = await self._assemble(scored, texts)
            outcome = self.buffer.commit(reservation, ref, keys, summary.min_version, summary.nbytes)
            if outcome is CommitOutcome.READY:
                self.ledger.scored(keys, summary.min_version)
                self.summaries[reservation.order] = summary
                self._with_texts.discard(reservation.order)
                del self.state.in_flight[reservation.order]
                return
            self.ledger.give_up(keys, f"{outcome}: made by version {summary.min_version}, finished at version "
                                f"{self.state.step}")
            self.ledger.lease(keys, self.state.step)
            again = self.buffer.reserve_again(reservation.samples)
            if reservation.order in self._with_texts:
                self._with_texts = self._with_texts - {reservation.order} | {again.order}
            self.state.in_flight[again.order] = self.state.in_flight.pop(reservation.order)
            reservation = again

    async def score(
        self, keys: list[SampleKey], seed: int, source: PromptSource, sampling: SamplingConfig | None = None
    ) -> Scored:
        """Generate a chunk and have it scored by the frozen models; `sampling` as in training if None."""
        return await self._rate(*await self._generate(keys, seed, source, sampling))

    async def _generate(
        self, keys: list[SampleKey], seed: int, source: PromptSource, sampling: SamplingConfig | None
    ) -> tuple[Call, Any]:
        """A chunk's rollout, and the reference to its prompts."""
        prompts = (await source.of(keys)).ref
        rank = self._generators.take(len(keys))
        try:
            rollout = await self.team.done(
                self.team.generators.call(rank, "generate", prompts, keys, seed, sampling), "generate"
            )
        finally:
            self._generators.give_back(rank, len(keys))
        return rollout, prompts

    async def _rate(self, rollout: Call, prompts: Any) -> Scored:
        """What the frozen models say, side by side."""
        reference, reward = await asyncio.gather(
            self._ask_reference(rollout.ref),
            self._ask(self._reward, "reward", "score", rollout.ref, prompts),
        )
        return Scored(rollout, reference, reward)

    async def _assemble(self, scored: Scored, texts: int) -> tuple[Any, ExperienceSummary]:
        team, rollout = self.team, scored.rollout.ref
        logprobs, values = await self._ask_learners(rollout)
        rank = self._assembler.take(1)
        try:
            call = team.assembler.call(
                rank, "assemble", self.state.reward_terms(self.config.algorithm.reward_normalisation), texts,
                len(logprobs), rollout, scored.reward.ref, scored.reference.ref,
                *logprobs, *values, outputs=2,
            )
            summary = await team.value(call, "assemble", 1)
        finally:
            self._assembler.give_back(rank, 1)
        return call.ref, summary

    async def _ask_learners(self, rollout: Any) -> tuple[list[Any], list[Any]]:
        """References to each policy rank's log-probabilities, and to each critic rank's values (none without one)."""
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

    async def _ask_reference(self, rollout: Any) -> Call:
        """The reference's log-probabilities: from its own workers, or from the policy's frozen base, rank by rank."""
        if self._reference is not None:
            return await self._ask(self._reference, "reference", "logprobs", rollout)
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
