"""From prompt keys to committed experience: admission of chunks, and their calls to the roles.

Each chunk is scored as soon as it is generated, while others are still being generated. At max_staleness > 0 chunks
that are generated at nearly the same time are scored together. The contents of a chunk and the order of chunks in a
batch are fixed at admission, and at max_staleness 0 each chunk is scored alone, so the result does not depend on
timing: replacements of quarantined prompts are drawn in the order of admission, after all chunks of the batch are
finished.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from rlhf_ray.config.derived import concurrency_of
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.dispatcher import kept
from rlhf_ray.coordinator.prompt_source import PromptsAhead, PromptSource
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.coordinator.route import Generated, Route
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.scoring_batcher import LINGER, ScoringBatcher
from rlhf_ray.errors import BufferError, UnscoredSamples, WorkerLost, first_line
from rlhf_ray.records import ExperienceSummary, SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.buffer_state import CommitOutcome, Entry, Eviction, Lease, Reservation
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.staleness import AdmissionRule


class Station(NamedTuple):
    """The current phase of a chunk under way."""

    reservation: Reservation
    doing: str
    """A participle: the chunk is being ..."""
    since: float
    """Start of the phase, in seconds of the step clock."""


class Member(NamedTuple):
    """A generated chunk in a scoring batch."""

    reservation: Reservation
    chunk: Generated
    texts: int
    """Rows to return as text."""


class Pipeline:
    """Keeps as many chunks under way as freshness and capacity allow, and returns batches."""

    def __init__(self, config: PPOConfig, roles: RoleGroups, state: RunState, buffer: ReplayBuffer,
                 prompts: PromptSource, ledger: Ledger, quarantine: Quarantine | None = None) -> None:
        """`quarantine` removes prompts with a sample that has no score; if None, such a prompt ends the run."""
        self.config, self.roles, self.state, self.buffer, self.ledger = config, roles, state, buffer, ledger
        self.route, self._prompts = Route(config, roles), PromptsAhead(prompts, state.cursor)
        self.quarantine = quarantine
        self._batcher = ScoringBatcher(self._assess)
        self._linger = LINGER if config.coordinator.max_staleness else 0.0
        self._rule = self._rule_of(len(roles.generators))
        self._running: dict[asyncio.Task[None], Reservation] = {}
        self._finished: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._generating = 0
        self._incomplete: dict[int, Reservation] = {}
        """Places of chunks that lost prompts to the quarantine and wait for others, by admission number; the remaining
        samples are in `RunState.in_flight`."""
        self._with_texts: set[int] = set()
        self.stations: dict[int, Station] = {}
        """The phase of each chunk under way, by admission number."""
        self.version = state.step
        """Version of the weights that all generators hold."""
        self.summaries: dict[int, ExperienceSummary] = {}
        """Summaries of committed chunks, by admission number; the loop removes them."""

    async def next_batch(self) -> Lease:
        """Wait until a whole batch is ready, and admit new work meanwhile. The first failure of a chunk is raised."""
        while True:
            self.buffer.expire()
            self.admit()
            lease = self.buffer.lease(self.config.coordinator.samples_per_step, self.state.step)
            if lease is not None:
                return lease
            if not self._running:
                raise BufferError(f"at step {self.state.step} the buffer ({self.buffer.stats()}) has no batch of "
                                  f"{self.config.coordinator.samples_per_step} samples, and no chunk is under way to "
                                  "fill it")
            await self._progress()

    async def _progress(self) -> None:
        """Wait until a chunk is finished; its failure is raised."""
        task = await self._finished.get()
        del self._running[task]
        task.result()

    def start_again(self, reservations: list[Reservation]) -> None:
        """Start the chunks of these places, which were under way when the run was saved. The generators hold the
        restored policy. If max_staleness is smaller than in the saved run, chunks beyond it lose their places, and
        their samples are admitted again later."""
        self.version = self.state.step
        dropped = {place.order: place for place in self.buffer.trim(self.config.coordinator.samples_per_step)}
        keys: list[SampleKey] = []
        for order, place in dropped.items():
            if isinstance(place, Entry):
                keys += self._give_up(place, f"of version {place.min_version}, when the run resumed at version "
                                      f"{self.version} with max_staleness={self.config.coordinator.max_staleness}")
            else:
                keys += self.state.in_flight.pop(order)
        self._admit_again(keys)
        remaining = [reservation for reservation in reservations if reservation.order not in dropped]
        self._with_texts.update(reservation.order for reservation in remaining[:1])
        for reservation in remaining:
            keys = self.state.in_flight[reservation.order]
            if len(keys) == reservation.samples:
                self._start(reservation, keys)
            else:
                self._incomplete[reservation.order] = reservation

    def make_again(self, evictions: list[Eviction]) -> None:
        """Admit the samples of evicted entries again: no prompt is lost because its experience is too old."""
        self._admit_again([key for eviction in evictions for key in self._give_up(
            eviction.entry, f"{eviction.staleness} versions old after the update of the policy")])

    def _give_up(self, entry: Entry, reason: str) -> tuple[SampleKey, ...]:
        """Give up the experience of a dropped entry; returns its samples."""
        self.summaries.pop(entry.order, None)
        self.ledger.give_up(entry.keys, reason)
        return entry.keys

    def _admit_again(self, keys: Sequence[SampleKey]) -> None:
        """Put samples that lost their place before all prompts that were not drawn yet."""
        self.state.returned[:0] = keys

    async def close(self) -> None:
        """Cancel all chunks under way."""
        self._batcher.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._incomplete.clear()
        self._finished, self._generating = asyncio.Queue(), 0
        self.stations.clear()

    def admit(self) -> None:
        """Start as many chunks as freshness, generators, capacity and the remaining steps allow, and complete the
        chunks that lost prompts."""
        self._admit_new()
        # At max_staleness 0 the whole batch is admitted and finished by then, so the losses of all chunks are known.
        # Otherwise the result may depend on timing, and chunks are completed immediately.
        if not self._running or self.config.coordinator.max_staleness:
            self._complete()

    def _admit_new(self) -> None:
        buffer = self.buffer
        if self._generators != len(self.roles.generators):  # some were added or removed
            self._rule = self._rule_of(len(self.roles.generators))
        allowance = self._rule.allowance(self.version, buffer.accepted, buffer.running, self._generating)
        left = self.config.run.steps * self.config.coordinator.samples_per_step - buffer.accepted - buffer.running
        allowance = min(allowance, left)
        while allowance > 0:
            size, position = self._next_chunk()
            if size > allowance:
                return
            reservation = buffer.reserve(size, self.version, again=bool(self.state.returned))
            if reservation is None:
                return
            if position == 0:  # the first chunk of each batch returns the sample texts
                self._with_texts.add(reservation.order)
            self._start(reservation, self._next_keys(size))
            allowance -= size

    def _complete(self) -> None:
        """Fill chunks that lost prompts with the next ones, in the order of admission."""
        for order, reservation in sorted(self._incomplete.items()):
            remaining = self.state.in_flight[order]
            self._start(reservation, remaining + self._next_keys(reservation.samples - len(remaining)))
        self._incomplete.clear()

    def _rule_of(self, generators: int) -> AdmissionRule:
        self._generators = generators
        return AdmissionRule(self.config.coordinator.samples_per_step, self.config.coordinator.max_staleness,
                             concurrency_of(self.config.coordinator, self.config.generator, generators))

    def _next_chunk(self) -> tuple[int, int]:
        """Size of the next chunk and its position in its batch, in samples. The last chunk of a batch is smaller, if
        chunks do not add up to a batch."""
        batch = self.config.coordinator.samples_per_step
        position = (self.buffer.accepted + self.buffer.running) % batch
        return min(self.config.generator.chunk, batch - position), position

    def _next_keys(self, samples: int) -> list[SampleKey]:
        """Samples to admit: first those that lost their place, then the cursor's next."""
        returned, per_prompt = self.state.returned, self.config.coordinator.samples_per_prompt
        keys = returned[:samples]
        del returned[:samples]
        rows = self._prompts.draw((samples - len(keys)) // per_prompt)
        new = [SampleKey(epoch, row, sample) for epoch, row in rows for sample in range(per_prompt)]
        self.ledger.admit(new, self.state.cursor.position)
        return keys + new

    def _start(self, reservation: Reservation, keys: list[SampleKey]) -> None:
        self.state.in_flight[reservation.order] = keys
        self._generating += len(keys)
        self.ledger.lease(keys, self.version)
        task = asyncio.create_task(self._make(reservation, keys), name=f"chunk {reservation.order}")
        self._running[task] = reservation
        task.add_done_callback(self._finished.put_nowait)

    async def _make(self, reservation: Reservation, keys: list[SampleKey]) -> None:
        """Process one chunk from prompts to committed experience. If its experience is too old, the chunk loses its
        place and its samples are admitted again. If prompts of the chunk or of its scoring batch were quarantined, it
        keeps its place, and is produced again with other prompts."""
        order, produce = reservation.order, partial(self._experience, reservation, keys)
        try:
            ref, summary = await kept(produce, self.config.cluster.max_restarts, partial(self._chunk_lost, keys))
        except UnscoredSamples as error:
            self.state.in_flight[order] = self._without_unscored(keys, error)
            self._incomplete[order] = reservation
        else:
            outcome = self.buffer.commit(reservation, ref, keys, summary.min_version, summary.nbytes)
            del self.state.in_flight[order]
            self._with_texts.discard(order)
            if outcome is CommitOutcome.READY:
                self.ledger.scored(keys, summary.min_version)
                self.summaries[order] = summary
            else:
                self.ledger.give_up(keys, f"{outcome}: generated by version {summary.min_version}, finished at version "
                                    f"{self.state.step}")
                self._admit_again(keys)
        del self.stations[order]
        self.admit()

    async def _experience(self, reservation: Reservation, keys: list[SampleKey]) -> tuple[Any, ExperienceSummary]:
        """Generate, score and assemble a chunk; returns the reference to its experience, and its summary."""
        began = self.roles.clock.now()
        self._note(reservation, "generated")
        chunk = await self._generate(keys)
        self._note(reservation, "scored")
        texts = self.config.logging.samples_per_step if reservation.order in self._with_texts else 0
        return await self._batcher.submit(
            Member(reservation, chunk, texts), self._linger * (self.roles.clock.now() - began))

    def _attempt_lost(self, keys: list[SampleKey], error: WorkerLost) -> None:
        """Record that an attempt at a chunk was lost with a worker or a node, and that the next one begins."""
        self.ledger.give_up(keys, first_line(error))
        self.ledger.lease(keys, self.version)

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

    def _chunk_lost(self, keys: list[SampleKey], error: WorkerLost) -> None:
        """Record the loss of a generated chunk, which is generated again."""
        self._attempt_lost(keys, error)
        self._generating += len(keys)

    async def _generate(self, keys: list[SampleKey]) -> Generated:
        """Generate a chunk; then admit others, because its generator is free."""
        try:
            await self.ledger.settled()  # the attempt must be on disk before it starts
            chunk = await self.route.generate(keys, self.config.run.seed, self._prompts, None,
                                              partial(self._attempt_lost, keys))
        finally:
            self._generating -= len(keys)
        self.ledger.generated(keys, chunk.rollout.worker)
        self.admit()
        return chunk

    async def _assess(self, members: Sequence[Member]) -> list[tuple[Any, ExperienceSummary]]:
        """Score and assemble a batch of chunks; returns the reference to each one's experience, and its summary."""
        scored = await self.route.rate([member.chunk for member in members])
        for member in members:
            self._note(member.reservation, "read by the learners")
        return await self.route.assemble(
            scored, lambda: self.state.reward_terms(self.config.algorithm.reward_normalisation),
            [member.texts for member in members])

    def _note(self, reservation: Reservation, doing: str) -> None:
        self.stations[reservation.order] = Station(reservation, doing, self.roles.clock.now())
