"""From prompt keys to committed experience: which chunks are admitted, and what happens to each.

Each chunk is scored as soon as it is generated, while others are still being generated. At max_staleness > 0 chunks
that are generated at nearly the same time are scored together. At max_staleness 0 each chunk is scored alone, and what
a batch contains, and in which order, is fixed at admission, so the result does not depend on timing: replacements of
quarantined prompts are drawn in the order of admission, after all chunks of the batch are finished.
"""

import asyncio
from collections.abc import Collection, Sequence

from rlhf_ray.config.derived import concurrency_of
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.chunk_calls import ChunkCalls, Columns
from rlhf_ray.coordinator.episode_journals import EpisodeJournals
from rlhf_ray.coordinator.quarantine import Quarantine
from rlhf_ray.coordinator.rollout_source import EpisodeSource, PromptsAhead, PromptSource, RolloutSource
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.scoring_batcher import LINGER, ScoringBatcher
from rlhf_ray.errors import BufferError, UnscoredSamples, WorkerLost, first_line
from rlhf_ray.records import SampleKey, Sifted
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.chunk import Chunk, CommitOutcome, Lease, Phase, Place
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.staleness import AdmissionRule, staleness
from rlhf_ray.roles.episode_numbers import incomplete
from rlhf_ray.workers.health_monitor import Decision
from rlhf_ray.workers.role_groups import RoleGroups


class Pipeline:
    """Keeps as many chunks under way as freshness and capacity allow, and returns batches."""

    def __init__(self, config: PPOConfig, roles: RoleGroups, calls: ChunkCalls, state: RunState, buffer: ReplayBuffer,
                 prompts: PromptSource, ledger: Ledger, quarantine: Quarantine | None = None,
                 journals: EpisodeJournals | None = None) -> None:
        """
        Args:
            quarantine: removes prompts with a sample that has no score; if None, such a prompt ends the run.
            journals: of episodes; None without environments.
        """
        self.config = config
        self._roles = roles
        self._calls = calls
        self.state = state
        self.buffer = buffer
        self.ledger = ledger
        self.quarantine = quarantine
        self.journals = journals
        self._prompts = PromptsAhead(prompts, state.cursor)
        self._rollouts = RolloutSource(roles.dispatcher(roles.generators), self._prompts, config.run.seed,
                                       episodes=EpisodeSource.of(config, roles, journals=journals))
        self.chat = prompts.chat
        """Whether the policy answers conversations."""
        self._batcher = ScoringBatcher(self._score_and_assemble)
        self._linger = LINGER if config.coordinator.max_staleness else 0.0
        dynamic = config.algorithm.dynamic_sampling
        self._draws = dynamic.max_batches if dynamic else 1
        """How often prompts are drawn for a place at most."""
        self._rule = self._rule_of(len(roles.generators))
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each chunk under way."""
        self._failures: list[BaseException] = []
        """Of chunks, oldest first."""
        self._finished = asyncio.Event()
        """A task of a chunk has ended."""
        self.exhausted = False
        """Whether there is no further batch, because the run may draw no more prompts."""

    async def next_batch(self) -> Lease | None:
        """Wait until a whole batch is ready, and admit new work meanwhile; None if the prompts do not suffice for one.
        The first failure of a chunk is raised."""
        while True:
            self._finished.clear()
            self.admit()
            lease = self.buffer.lease(self.config.coordinator.samples_per_step, self.state.step)
            if lease is not None:
                return lease
            if self._failures:
                raise self._failures.pop(0)
            if not self._tasks and self.exhausted:
                return None
            if not self._tasks:
                raise BufferError(f"at step {self.state.step} the buffer ({self.buffer.stats()}) has no batch of "
                                  f"{self.config.coordinator.samples_per_step} samples, and no chunk is under way to "
                                  "fill it")
            await self._finished.wait()

    def resume(self) -> None:
        """Start the reserved chunks: after the restore of a checkpoint, whose policy the generators hold, or after
        `give_up_since`. If max_staleness is smaller than in the saved run, chunks beyond it lose their places, and
        their samples are admitted again later. A bound of `run.epochs` is kept unless the number of steps has
        changed."""
        if self.state.most_prompts != self.config.run.steps * self.config.coordinator.prompts_per_step:
            self.state.most_prompts = None
        returned: list[SampleKey] = []
        for chunk in self.buffer.trim(self.config.coordinator.samples_per_step):
            if chunk.phase is Phase.READY:
                self.ledger.give_up(chunk.keys, f"of version {chunk.min_version}, when the run resumed at version "
                                    f"{self.state.step} with max_staleness={self.config.coordinator.max_staleness}")
            returned += chunk.keys
        self._return_keys(returned)
        for chunk in self.buffer.under_way():
            if chunk.complete:
                self._start(chunk)

    def return_evicted(self, evicted: list[Chunk]) -> None:
        """Admit the samples of evicted chunks again: no prompt is lost because its experience is too old."""
        for chunk in evicted:
            age = staleness(chunk.min_version, self.state.step)
            self.ledger.give_up(chunk.keys, f"{age} versions old after the update of the policy")
        self._return_keys([key for chunk in evicted for key in chunk.keys])

    async def give_up_since(self, kept: Collection[Place], reason: str) -> None:
        """Give up all chunks under way, and ready experience except that of the places `kept`. `resume` starts all
        these chunks again, in their places."""
        begun = [chunk for chunk in self.buffer.under_way() if chunk.phase is not Phase.ADMITTED]
        await self.close()
        if self.journals is not None:
            await self.journals.discard()
        for chunk in begun:
            self.ledger.give_up(chunk.keys, reason)
        for chunk in self.buffer.ready():
            if chunk.place not in kept:
                self.buffer.reopen(chunk)
                self.ledger.give_up(chunk.keys, reason)

    async def close(self, patience_s: float | None = None) -> None:
        """Cancel all chunks under way. When this returns, generators and episode runners have ended them, except those
        that have not answered within `patience_s` (`cluster.heartbeat_timeout_s` if None)."""
        self._batcher.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        self._finished = asyncio.Event()
        self._failures.clear()
        for chunk in self.buffer.under_way():
            chunk.forget()
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
        allowance = self._rule.allowance(self.state.published, buffer.accepted, buffer.running,
                                         generating=buffer.samples_in(Phase.GENERATE))
        left = self.config.run.steps * self.config.coordinator.samples_per_step - buffer.accepted - buffer.running
        allowance = min(allowance, left)
        while allowance > 0:
            size = self._next_chunk()
            if size > allowance or self._at_the_end(size):
                return
            chunk = buffer.reserve(size, self.state.published, again=bool(self.state.returned))
            if chunk is None:
                return
            chunk.keys = self._next_keys(size)
            self._start(chunk)
            allowance -= size

    def _complete(self) -> None:
        """Fill chunks that lost prompts with the next ones, in the order of admission."""
        if not self.buffer.samples_in(Phase.ADMITTED):
            return
        for chunk in self.buffer.under_way():
            missing = chunk.samples - len(chunk.keys)
            if chunk.phase is Phase.ADMITTED and missing and not self._at_the_end(missing):
                chunk.keys = chunk.keys + self._next_keys(missing)
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

    def _at_the_end(self, samples: int) -> bool:
        """Whether the prompts of the run do not suffice for so many samples; `exhausted` says so from then on."""
        most = self.state.most_prompts
        new = max(0, samples - len(self.state.returned)) // self.config.coordinator.samples_per_prompt
        self.exhausted = most is not None and sum(self.state.cursor.position) + new > most
        return self.exhausted

    def _next_keys(self, samples: int) -> list[SampleKey]:
        """Samples to admit: first those that lost their place, then the cursor's next."""
        returned = self.state.returned
        per_prompt = self.config.coordinator.samples_per_prompt
        keys = returned[:samples]
        del returned[:samples]
        rows = self._prompts.draw((samples - len(keys)) // per_prompt)
        new = [SampleKey(epoch, row, sample) for epoch, row in rows for sample in range(per_prompt)]
        self.ledger.admit(new, self.state.cursor.position)
        return keys + new

    def _return_keys(self, keys: Sequence[SampleKey]) -> None:
        """Put samples that lost their place before all prompts that were not drawn yet."""
        self.state.returned[:0] = keys

    # One chunk

    def _start(self, chunk: Chunk) -> None:
        """Begin to produce a chunk, which has all its keys."""
        self._enter(chunk, Phase.GENERATE)
        self.ledger.start_attempt(chunk.keys, self.state.published)
        task = asyncio.create_task(self._produce(chunk), name=f"chunk {chunk.place}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._finished.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    async def _produce(self, chunk: Chunk) -> None:
        """Generate, score and assemble a chunk, and commit its experience.

        - If an object was lost with a node, the chunk is generated again, and so are the others of its scoring batch.
          (One that was lost in a pass of several learner ranks restarts all learners.)
        - If its experience is too old, it loses its place, and its samples are admitted again.
        - With dynamic sampling, prompts whose scores are equal are filtered when the rest of the chunk is committed.
        - If prompts of it were quarantined, the others go on with the tokens that they have, and a chunk of its own
          waits for prompts that replace them. If prompts of another chunk in its scoring batch were, it is scored
          again.
        """
        losses = 0
        linger_s = 0.0
        staying: list[int] | None = None  # numbers of the samples that stay in the rollout, after others have left
        while True:
            try:
                if chunk.rollout is None:
                    linger_s = await self._generate(chunk, repeated=losses > 0)
                elif staying is not None:
                    chunk.rollout = await self._calls.samples_of(chunk.rollout, staying)
                    staying = None
                await self._batcher.submit(chunk, linger_s)
            except UnscoredSamples as error:
                staying = self._leave_out(chunk, error)
                if not chunk.keys:
                    break
                self._enter(chunk, Phase.SCORE)
                self.admit()
            except WorkerLost as error:
                losses += 1
                again = self._roles.health.lost(error) is Decision.REPRODUCE
                if not again or losses > self.config.cluster.max_restarts:
                    raise
                chunk.forget()
                staying = None
                self._enter(chunk, Phase.GENERATE)
                self._begin_attempt_again(chunk, error)
            else:
                self._commit(chunk)
                break
        self.admit()

    async def _generate(self, chunk: Chunk, repeated: bool) -> float:
        """Generate a chunk, by another generator if one is lost; then admit others, because its generator is free.
        Returns how long the chunk may wait for others to be scored with, in seconds."""
        began = self._roles.clock.now()

        async def again(error: WorkerLost) -> None:
            self._begin_attempt_again(chunk, error)
            await self.ledger.settled()

        await self.ledger.settled()  # the attempt must be on disk before it starts
        await self._rollouts.generate(chunk, again, repeated)
        self.ledger.generated(chunk.keys, chunk.generator)
        self._enter(chunk, Phase.SCORE)
        self.admit()
        return self._linger * (self._roles.clock.now() - began)

    async def _score_and_assemble(self, chunks: Sequence[Chunk]) -> None:
        """Make experience of generated chunks."""
        columns = await self._calls.score(chunks)
        if any(chunk.draws < self._draws for chunk in chunks):
            chunks, columns = await self._sift(chunks, columns)
        if not chunks:
            return
        for chunk in chunks:
            self._enter(chunk, Phase.ASSEMBLE)
        columns |= await self._calls.learner_passes(chunks)
        terms = self.state.reward_terms(self.config.algorithm.reward_normalisation)  # as of now: all scores are there
        await self._calls.assemble(chunks, columns, terms)

    async def _sift(self, chunks: Sequence[Chunk], columns: Columns) -> tuple[Sequence[Chunk], Columns]:
        """Dynamic sampling: continue with the samples of prompts whose scores differ. What is drawn last for a place is
        kept whatever its scores are."""
        for chunk, sifted in zip(chunks, await self._calls.sift(chunks, columns), strict=True):
            if chunk.draws < self._draws and len(sifted.kept) < len(chunk.keys):
                chunk.sifted = sifted
        return await self._calls.keep(chunks, columns)

    def _filter(self, chunk: Chunk, sifted: Sifted) -> None:
        """Take the samples of prompts with equal scores out of a chunk: they are settled, and their place becomes a
        chunk of its own, which waits for other prompts. Which samples these are follows from their keys and the
        weights."""
        kept = [chunk.keys[number] for number in sifted.kept]
        staying = set(kept)
        left = [key for key in chunk.keys if key not in staying]
        rest = self.buffer.split(chunk, kept)
        self.ledger.filter(left, "the scores of its prompt's samples are equal")
        rest.draws = chunk.draws + 1
        rest.filtered = {name: chunk.filtered.get(name, []) + scores for name, scores in sifted.others.items()}
        chunk.filtered = {}

    def _commit(self, chunk: Chunk) -> None:
        """Put a chunk's experience into its place, if it is fresh enough, without the samples that are filtered."""
        if chunk.sifted is not None:
            self._filter(chunk, chunk.sifted)
            if not chunk.keys:
                return
        outcome = self.buffer.commit(chunk)
        if outcome is CommitOutcome.READY:
            self.ledger.scored(chunk.keys, chunk.min_version, incomplete(chunk.summary.episodes))
        else:
            self.ledger.give_up(chunk.keys, f"{outcome}: generated by version {chunk.min_version}, finished at "
                                f"version {self.state.step}")
            self._return_keys(chunk.keys)

    def _leave_out(self, chunk: Chunk, error: UnscoredSamples) -> list[int] | None:
        """Quarantine the prompts of a chunk that have samples without a score; returns the numbers of the samples that
        stay in its rollout, or None if all do.

        The samples that stay keep their place and what was generated of them. The place of the others becomes a chunk
        of its own, which waits for other prompts. Who leaves follows from the samples' keys and never from timing, so
        at max_staleness 0 it is always the same samples that are scored together.

        Raises:
            RewardError: too many prompts were quarantined.
            UnscoredSamples: there is no quarantine.
        """
        if self.quarantine is None:
            raise error
        kept = self.quarantine.set_aside(chunk.keys, error)
        if len(kept) == len(chunk.keys):  # the prompts of other chunks in its scoring batch leave
            return None
        staying = set(kept)
        numbers = [number for number, key in enumerate(chunk.keys) if key in staying]
        self.buffer.split(chunk, kept)
        return numbers

    def _begin_attempt_again(self, chunk: Chunk, error: WorkerLost) -> None:
        """Record that an attempt at a chunk was lost with a worker or a node, and that the next one begins."""
        self.ledger.give_up(chunk.keys, first_line(error))
        self.ledger.start_attempt(chunk.keys, self.state.published)

    def _enter(self, chunk: Chunk, phase: Phase) -> None:
        self.buffer.enter(chunk, phase, self._roles.clock.now())
