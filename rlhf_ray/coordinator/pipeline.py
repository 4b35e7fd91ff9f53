"""From prompt keys to committed experience: which chunks are admitted, and the way of each of them.

Each chunk is scored as soon as it is generated, while others are still being generated. At max_staleness > 0 chunks
that are generated at nearly the same time are scored together. The contents of a chunk and the order of chunks in a
batch are fixed at admission, and at max_staleness 0 each chunk is scored alone, so the result does not depend on
timing: replacements of quarantined prompts are drawn in the order of admission, after all chunks of the batch are
finished.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from rlhf_ray.config.derived import concurrency_of
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.chunk import Chunk, Phase
from rlhf_ray.coordinator.chunk_calls import ChunkCalls, Generated
from rlhf_ray.coordinator.prompt_source import PromptsAhead, PromptSource
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.scoring_batcher import LINGER, ScoringBatcher
from rlhf_ray.errors import BufferError, UnscoredSamples, WorkerLost, first_line
from rlhf_ray.records import ExperienceSummary, SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.buffer_records import CommitOutcome, Entry, Lease
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.staleness import AdmissionRule, staleness
from rlhf_ray.workers.health_monitor import Decision
from rlhf_ray.workers.role_groups import RoleGroups


class Item(NamedTuple):
    """A generated chunk in a scoring batch."""

    chunk: Chunk
    generated: Generated


class Pipeline:
    """Keeps as many chunks under way as freshness and capacity allow, and returns batches."""

    def __init__(self, config: PPOConfig, roles: RoleGroups, calls: ChunkCalls, state: RunState, buffer: ReplayBuffer,
                 prompts: PromptSource, ledger: Ledger, quarantine: Quarantine | None = None) -> None:
        """`quarantine` removes prompts with a sample that has no score; if None, such a prompt ends the run."""
        self.config, self._roles, self._calls, self.state = config, roles, calls, state
        self.buffer, self.ledger, self.quarantine = buffer, ledger, quarantine
        self._prompts = PromptsAhead(prompts, state.cursor)
        self.chat = prompts.chat
        """Whether the policy answers conversations."""
        self._batcher = ScoringBatcher(self._score_and_assemble)
        self._linger = LINGER if config.coordinator.max_staleness else 0.0
        self._rule = self._rule_of(len(roles.generators))
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each chunk on its way."""
        self._failures: list[BaseException] = []
        """Of chunks, oldest first."""
        self._finished = asyncio.Event()
        """A chunk has come to the end of its way."""
        self._generating = 0
        """Samples of the chunks that are being generated, or wait for a generator."""
        self._incomplete: list[Chunk] = []
        """Chunks that lost prompts to the quarantine and wait for others."""

    async def next_batch(self) -> Lease:
        """Wait until a whole batch is ready, and admit new work meanwhile. The first failure of a chunk is raised."""
        while True:
            self._finished.clear()
            self.admit()
            lease = self.buffer.lease(self.config.coordinator.samples_per_step, self.state.step)
            if lease is not None:
                return lease
            if self._failures:
                raise self._failures.pop(0)
            if not self._tasks:
                raise BufferError(f"at step {self.state.step} the buffer ({self.buffer.stats()}) has no batch of "
                                  f"{self.config.coordinator.samples_per_step} samples, and no chunk is under way to "
                                  "fill it")
            await self._finished.wait()

    def resume(self) -> None:
        """Start the chunks that were under way when the run was saved. The generators hold the restored policy. If
        max_staleness is smaller than in the saved run, chunks beyond it lose their places, and their samples are
        admitted again later."""
        keys: list[SampleKey] = []
        for place in self.buffer.trim(self.config.coordinator.samples_per_step):
            if isinstance(place, Entry):
                keys += self._give_up(place, f"of version {place.min_version}, when the run resumed at version "
                                      f"{self.state.step} with max_staleness={self.config.coordinator.max_staleness}")
            else:
                keys += self.state.chunks.pop(place.order).keys
        self._admit_again(keys)
        for chunk in sorted(self.state.chunks.values(), key=lambda chunk: chunk.order):
            if chunk.complete:
                self._start(chunk)
            else:
                self._incomplete.append(chunk)

    def readmit(self, evicted: list[Entry]) -> None:
        """Admit the samples of evicted entries again: no prompt is lost because its experience is too old."""
        self._admit_again([key for entry in evicted for key in self._give_up(
            entry, f"{staleness(entry.min_version, self.state.step)} versions old after the update of the policy")])

    async def give_up_since(self, kept: Collection[int], reason: str) -> None:
        """Give up all chunks under way, and ready experience but for the entries `kept` (by admission number). `resume`
        starts the chunks again; samples of experience that was given up are admitted again."""
        begun = [] if not (self._tasks or self._failures) else [
            chunk for chunk in self.state.chunks.values() if chunk not in self._incomplete]
        await self.close()
        for chunk in begun:
            self.ledger.give_up(chunk.keys, reason)
        dropped = [entry for entry in self.buffer.ready_entries() if entry.order not in kept]
        self.buffer.drop(dropped)
        self._admit_again([key for entry in dropped for key in self._give_up(entry, reason)])

    async def close(self) -> None:
        """Cancel all chunks under way."""
        self._batcher.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._finished, self._generating = asyncio.Event(), 0
        self._failures.clear()
        self._incomplete.clear()
        for chunk in self.state.chunks.values():
            self._enter(chunk, Phase.ADMITTED)

    # Admission

    def admit(self) -> None:
        """Start as many chunks as freshness, generators, capacity and the remaining steps allow, and complete the
        chunks that lost prompts."""
        self._admit_new()
        # At max_staleness 0 the whole batch is admitted and finished by then, so the losses of all chunks are known; a
        # failed chunk's are not, until the run is resumed. Otherwise the result may depend on timing, and chunks are
        # completed immediately.
        if not (self._tasks or self._failures) or self.config.coordinator.max_staleness:
            self._complete()

    def _admit_new(self) -> None:
        buffer = self.buffer
        if self._generators != len(self._roles.generators):  # some were added or removed
            self._rule = self._rule_of(len(self._roles.generators))
        allowance = self._rule.allowance(self.state.published, buffer.accepted, buffer.running, self._generating)
        left = self.config.run.steps * self.config.coordinator.samples_per_step - buffer.accepted - buffer.running
        allowance = min(allowance, left)
        while allowance > 0:
            size = self._next_chunk()
            if size > allowance:
                return
            place = buffer.reserve(size, self.state.published, again=bool(self.state.returned))
            if place is None:
                return
            chunk = Chunk(place, self._next_keys(size))
            self.state.chunks[chunk.order] = chunk
            self._start(chunk)
            allowance -= size

    def _complete(self) -> None:
        """Fill chunks that lost prompts with the next ones, in the order of admission."""
        incomplete, self._incomplete = self._incomplete, []
        for chunk in sorted(incomplete, key=lambda chunk: chunk.order):
            chunk.keys = chunk.keys + self._next_keys(chunk.place.samples - len(chunk.keys))
            self._start(chunk)

    def _rule_of(self, generators: int) -> AdmissionRule:
        self._generators = generators
        return AdmissionRule(self.config.coordinator.samples_per_step, self.config.coordinator.max_staleness,
                             concurrency_of(self.config.coordinator, self.config.generator, generators))

    def _next_chunk(self) -> int:
        """Size of the next chunk, in samples. The last chunk of a batch is smaller, if chunks do not add up to a
        batch."""
        batch = self.config.coordinator.samples_per_step
        position = (self.buffer.accepted + self.buffer.running) % batch
        return min(self.config.generator.chunk, batch - position)

    def _next_keys(self, samples: int) -> list[SampleKey]:
        """Samples to admit: first those that lost their place, then the cursor's next."""
        returned, per_prompt = self.state.returned, self.config.coordinator.samples_per_prompt
        keys = returned[:samples]
        del returned[:samples]
        rows = self._prompts.draw((samples - len(keys)) // per_prompt)
        new = [SampleKey(epoch, row, sample) for epoch, row in rows for sample in range(per_prompt)]
        self.ledger.admit(new, self.state.cursor.position)
        return keys + new

    def _admit_again(self, keys: Sequence[SampleKey]) -> None:
        """Put samples that lost their place before all prompts that were not drawn yet."""
        self.state.returned[:0] = keys

    def _give_up(self, entry: Entry, reason: str) -> tuple[SampleKey, ...]:
        """Give up the experience of a dropped entry; returns its samples."""
        self.ledger.give_up(entry.keys, reason)
        return entry.keys

    # The way of one chunk

    def _start(self, chunk: Chunk) -> None:
        self._generating += len(chunk.keys)
        self.ledger.start_attempt(chunk.keys, self.state.published)
        task = asyncio.create_task(self._produce(chunk), name=f"chunk {chunk.order}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._finished.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    async def _produce(self, chunk: Chunk) -> None:
        """Generate, score and assemble a chunk, and commit its experience.

        If an object was lost with a node, the chunk is generated again. If its experience is too old, it loses its
        place, and its samples are admitted again. If prompts of it, or of others in its scoring batch, were
        quarantined, it keeps its place, and is produced again with other prompts.
        """
        losses = 0
        while True:
            try:
                began = self._roles.clock.now()
                generated = await self._generate(chunk)
                self._enter(chunk, Phase.SCORE)
                linger = self._linger * (self._roles.clock.now() - began)
                ref, summary = await self._batcher.submit(Item(chunk, generated), linger)
            except UnscoredSamples as error:
                chunk.keys = self._without_unscored(chunk.keys, error)
                self._incomplete.append(chunk)
                break
            except WorkerLost as error:
                losses += 1
                again = self._roles.health.lost(error) is Decision.REPRODUCE
                if not again or losses > self.config.cluster.max_restarts:
                    raise
                self._start_attempt_again(chunk, error)
                self._generating += len(chunk.keys)
            else:
                self._commit(chunk, ref, summary)
                break
        self._enter(chunk, Phase.ADMITTED)
        self.admit()

    async def _generate(self, chunk: Chunk) -> Generated:
        """Generate a chunk, by another generator if one is lost; then admit others, because its generator is free."""
        self._enter(chunk, Phase.GENERATE)
        keys = chunk.keys
        try:
            await self.ledger.settled()  # the attempt must be on disk before it starts
            prompts = await self._prompts.of(keys)
            while True:
                try:
                    generated = await self._calls.generate(prompts, keys, self.config.run.seed)
                    break
                except WorkerLost as error:
                    if self._calls.generators.lost(error, len(keys)) is not Decision.RETRY:
                        raise
                    self._start_attempt_again(chunk, error)
                    await self.ledger.settled()
        finally:
            self._generating -= len(keys)
        self.ledger.generated(keys, generated.rollout.worker)
        self.admit()
        return generated

    async def _score_and_assemble(self, items: Sequence[Item]) -> list[tuple[Any, ExperienceSummary]]:
        """Score and assemble a batch of chunks; returns the reference to each one's experience, and its summary."""
        scored = await self._calls.score([item.generated for item in items])
        for item in items:
            self._enter(item.chunk, Phase.ASSEMBLE)
        logprobs, values = await self._calls.learner_passes(scored)
        terms = self.state.reward_terms(self.config.algorithm.reward_normalisation)  # as of now: all scores are there
        return await self._calls.assemble(scored, logprobs, values, terms)

    def _commit(self, chunk: Chunk, ref: Any, summary: ExperienceSummary) -> None:
        """Put a chunk's experience into its place, if it is fresh enough."""
        outcome = self.buffer.commit(chunk.place, ref, chunk.keys, summary.min_version, summary.nbytes, summary)
        del self.state.chunks[chunk.order]
        if outcome is CommitOutcome.READY:
            self.ledger.scored(chunk.keys, summary.min_version)
        else:
            self.ledger.give_up(chunk.keys, f"{outcome}: generated by version {summary.min_version}, finished at "
                                f"version {self.state.step}")
            self._admit_again(chunk.keys)

    def _start_attempt_again(self, chunk: Chunk, error: WorkerLost) -> None:
        """Record that an attempt at a chunk was lost with a worker or a node, and that the next one begins."""
        self.ledger.give_up(chunk.keys, first_line(error))
        self.ledger.start_attempt(chunk.keys, self.state.published)

    def _without_unscored(self, keys: list[SampleKey], error: UnscoredSamples) -> list[SampleKey]:
        """The samples of a chunk whose prompts were not quarantined. They are generated again, with the same result,
        because seeds depend on keys.

        Raises:
            RewardError: too many prompts were quarantined.
        """
        if self.quarantine is None:
            raise error
        remaining = self.quarantine.set_aside(keys, error)
        self.ledger.give_up(remaining, "other prompts of its chunk or batch were quarantined; it is generated again")
        return remaining

    def _enter(self, chunk: Chunk, phase: Phase) -> None:
        chunk.phase, chunk.since = phase, self._roles.clock.now()
