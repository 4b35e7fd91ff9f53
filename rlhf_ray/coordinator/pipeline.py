"""From prompt keys to committed experience: admission, and the way of one chunk through the roles.

Every chunk is scored as soon as it is generated, while others are still being generated; where timing may choose, those
that are generated at nearly the same time go on together. What is in a chunk and in which order chunks form a batch is
fixed at admission, so at max_staleness 0, where each goes alone, timing changes nothing about the result: prompts that
take the place of others are drawn when it is known of every chunk of the batch which ones it lost, in the order of
admission.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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
    """What happens to a chunk under way."""

    reservation: Reservation
    doing: str
    """The chunk is being ..."""
    since: float
    """In seconds of the step clock."""


class Member(NamedTuple):
    """A generated chunk that is scored in a batch with others."""

    reservation: Reservation
    chunk: Generated
    texts: int
    """Rows to be kept as text."""


class Pipeline:
    """Keeps as many chunks under way as freshness and capacity allow, and hands out batches."""

    def __init__(self, config: PPOConfig, roles: RoleGroups, state: RunState, buffer: ReplayBuffer,
                 prompts: PromptSource, ledger: Ledger, quarantine: Quarantine | None = None) -> None:
        """`quarantine` takes prompts without a score; without one, such a prompt ends the run."""
        self.config, self.roles, self.state, self.buffer, self.ledger = config, roles, state, buffer, ledger
        self.route, self._prompts = Route(config, roles), PromptsAhead(prompts, state.cursor)
        self.quarantine = quarantine
        self._batcher = ScoringBatcher(self._assess)
        self._linger = LINGER if config.coordinator.max_staleness else 0.0
        self._rule = self._rule_of(len(roles.generators))
        self._running: dict[asyncio.Task[None], Reservation] = {}
        self._over: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._generating = 0
        self._incomplete: dict[int, Reservation] = {}
        """Places of chunks that lost prompts and wait for others, by admission number; what stays is in
        `RunState.in_flight`."""
        self._with_texts: set[int] = set()
        self.stations: dict[int, Station] = {}
        """Where each chunk under way is, by admission number."""
        self.version = state.step
        """Version of the weights that all generators hold."""
        self.summaries: dict[int, ExperienceSummary] = {}
        """What is known of committed chunks, by admission number; the loop takes them out."""

    async def next_batch(self) -> Lease:
        """Wait until a whole batch is ready, admitting new work all the while. A chunk's first failure is raised."""
        while True:
            self.buffer.expire()
            self.admit()
            lease = self.buffer.lease(self.config.samples_per_step, self.state.step)
            if lease is not None:
                return lease
            if not self._running:
                raise BufferError(f"at step {self.state.step} {self.buffer.stats()} is no batch of "
                                  f"{self.config.samples_per_step} samples, and nothing is under way to fill it")
            await self._progress()

    async def _progress(self) -> None:
        """Wait until a chunk is over; its failure is raised."""
        task = await self._over.get()
        del self._running[task]
        task.result()

    def start_again(self, reservations: list[Reservation]) -> None:
        """Make the chunks of these places, which were under way when the run was saved. The generators hold the
        restored policy. What a smaller max_staleness than the saved run's does not admit is admitted anew, when its
        turn comes."""
        self.version = self.state.step
        dropped = {place.order: place for place in self.buffer.trim(self.config.samples_per_step)}
        again: list[SampleKey] = []
        for order, place in dropped.items():
            if isinstance(place, Entry):
                again += self._given_up(place, f"of version {place.min_version}, when the run went on at version "
                                        f"{self.version} with max_staleness={self.config.coordinator.max_staleness}")
            else:
                again += self.state.in_flight.pop(order)
        self._admit_again(again)
        kept = [reservation for reservation in reservations if reservation.order not in dropped]
        self._with_texts.update(reservation.order for reservation in kept[:1])
        for reservation in kept:
            keys = self.state.in_flight[reservation.order]
            if len(keys) == reservation.samples:
                self._start(reservation, keys)
            else:
                self._incomplete[reservation.order] = reservation

    def make_again(self, evictions: list[Eviction]) -> None:
        """Admit the samples of dropped entries anew; no prompt is lost because its experience grew too old."""
        self._admit_again([key for eviction in evictions for key in self._given_up(
            eviction.entry, f"{eviction.staleness} versions old when the policy was renewed")])

    def _given_up(self, entry: Entry, reason: str) -> tuple[SampleKey, ...]:
        """The samples of an entry that was dropped."""
        self.summaries.pop(entry.order, None)
        self.ledger.give_up(entry.keys, reason)
        return entry.keys

    def _admit_again(self, keys: Sequence[SampleKey]) -> None:
        """Let samples that have no place any more come before all that was not drawn yet."""
        self.state.returned[:0] = keys

    async def close(self) -> None:
        """Drop what is under way."""
        self._batcher.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._incomplete.clear()
        self._over, self._generating = asyncio.Queue(), 0
        self.stations.clear()

    def admit(self) -> None:
        """Start what freshness, generators and capacity allow, and no more than the remaining steps will train on; and
        complete the chunks that lost prompts."""
        self._admit_new()
        # At max_staleness 0 the whole batch is admitted by then, and what each chunk lost is known. Otherwise timing
        # may choose, and nobody waits.
        if not self._running or self.config.coordinator.max_staleness:
            self._complete()

    def _admit_new(self) -> None:
        buffer = self.buffer
        if self._generators != len(self.roles.generators):  # some were added or removed
            self._rule = self._rule_of(len(self.roles.generators))
        allowance = self._rule.allowance(self.version, buffer.accepted, buffer.running, self._generating)
        left = self.config.run.steps * self.config.samples_per_step - buffer.accepted - buffer.running
        allowance = min(allowance, left)
        while allowance > 0:
            size, position = self._next_chunk()
            if size > allowance:
                return
            reservation = buffer.reserve(size, self.version, again=bool(self.state.returned))
            if reservation is None:
                return
            if position == 0:  # of each batch the first chunk gives the texts that are kept
                self._with_texts.add(reservation.order)
            self._start(reservation, self._next_keys(size))
            allowance -= size

    def _complete(self) -> None:
        """Give chunks that lost prompts the next ones, in the order of their admission."""
        for order, reservation in sorted(self._incomplete.items()):
            staying = self.state.in_flight[order]
            self._start(reservation, staying + self._next_keys(reservation.samples - len(staying)))
        self._incomplete.clear()

    def _rule_of(self, generators: int) -> AdmissionRule:
        self._generators = generators
        return AdmissionRule(self.config.samples_per_step, self.config.coordinator.max_staleness,
                             self.config.concurrency_of(generators))

    def _next_chunk(self) -> tuple[int, int]:
        """Samples of the next chunk and its place in its batch: full chunks, and a smaller last one, so that chunks add
        up to whole batches."""
        batch = self.config.samples_per_step
        position = (self.buffer.accepted + self.buffer.running) % batch
        return min(self.config.generator.chunk, batch - position), position

    def _next_keys(self, samples: int) -> list[SampleKey]:
        """Samples to admit: those that were admitted before and have no place any more, then the cursor's next."""
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
        task.add_done_callback(self._over.put_nowait)

    async def _make(self, reservation: Reservation, keys: list[SampleKey]) -> None:
        """One chunk from prompt to committed experience. One that came out too old for the bound loses its place and is
        admitted again; where prompts of it, or of its batch, were left out, it keeps its place, and is made again
        with others."""
        order, made = reservation.order, partial(self._experience, reservation, keys)
        try:
            ref, summary = await kept(made, self.config.cluster.max_restarts, partial(self._all_over, keys))
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
                self.ledger.give_up(keys, f"{outcome}: made by version {summary.min_version}, finished at version "
                                    f"{self.state.step}")
                self._admit_again(keys)
        del self.stations[order]
        self.admit()

    async def _experience(self, reservation: Reservation, keys: list[SampleKey]) -> tuple[Any, ExperienceSummary]:
        """A chunk generated, scored and assembled."""
        began = self.roles.clock.now()
        self._note(reservation, "generated")
        chunk = await self._generate(keys)
        self._note(reservation, "scored")
        texts = self.config.logging.samples_per_step if reservation.order in self._with_texts else 0
        return await self._batcher.submit(
            Member(reservation, chunk, texts), self._linger * (self.roles.clock.now() - began))

    def _attempt_over(self, keys: list[SampleKey], error: WorkerLost) -> None:
        """An attempt at a chunk was lost with a worker or a node; the next one begins."""
        self.ledger.give_up(keys, first_line(error))
        self.ledger.lease(keys, self.version)

    def _without_unscored(self, keys: list[SampleKey], error: UnscoredSamples) -> list[SampleKey]:
        """The samples of a chunk whose prompts stay. They are drawn again, and what has the same key comes out the
        same.

        Raises:
            RewardError: too many were set aside.
        """
        if self.quarantine is None:
            raise error
        staying = self.quarantine.set_aside(keys, error)
        self.ledger.give_up(staying, "prompts of its chunk or batch were left out, and the others drawn again")
        return staying

    def _all_over(self, keys: list[SampleKey], error: WorkerLost) -> None:
        """A chunk is generated once more, after it was already."""
        self._attempt_over(keys, error)
        self._generating += len(keys)

    async def _generate(self, keys: list[SampleKey]) -> Generated:
        """A chunk; when its generator is done with it there may be room for another one."""
        try:
            await self.ledger.settled()  # first of all, that there is an attempt is on disk
            chunk = await self.route.generate(keys, self.config.run.seed, self._prompts, None,
                                              partial(self._attempt_over, keys))
        finally:
            self._generating -= len(keys)
        self.ledger.generated(keys, chunk.rollout.worker)
        self.admit()
        return chunk

    async def _assess(self, members: Sequence[Member]) -> list[tuple[Any, ExperienceSummary]]:
        """Score a batch of chunks: each one's experience, by reference, and what is known of it."""
        scored = await self.route.rate([member.chunk for member in members])
        for member in members:
            self._note(member.reservation, "read by the learners")
        return await self.route.assemble(
            scored, lambda: self.state.reward_terms(self.config.algorithm.reward_normalisation),
            [member.texts for member in members])

    def _note(self, reservation: Reservation, doing: str) -> None:
        self.stations[reservation.order] = Station(reservation, doing, self.roles.clock.now())
