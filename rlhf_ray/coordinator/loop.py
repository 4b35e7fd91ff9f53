"""PPO's training loop: get a batch, learn from it, publish the new policy, record metrics."""

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_ray.config.derived import Derived, compared_components
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.best_checkpoint import BestKeeper
from rlhf_ray.coordinator.chunk_calls import ENDING_S, ChunkCalls
from rlhf_ray.coordinator.episode_watch import EpisodeWatch
from rlhf_ray.coordinator.evaluation import Evaluation, Evaluator
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.recovery import NOT_SAVED, Recovery, SavePace, reported
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.sample_saving import SampleSaving
from rlhf_ray.coordinator.step_metrics import Drawn, StepOutcome, step_metrics
from rlhf_ray.coordinator.step_profile import StepProfiler
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.update_step import Learning
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.errors import (
    CheckpointError,
    DiskStalled,
    GeneratorMismatch,
    RLHFError,
    RunInterrupted,
    WorkerError,
    first_line,
)
from rlhf_ray.failpoints import reached
from rlhf_ray.files.writer_thread import RunFiles
from rlhf_ray.observability.metric_catalogue import shown
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.chunk import BufferStats, Lease, Place
from rlhf_ray.workers.calls import traffic
from rlhf_ray.workers.role_groups import RoleGroups


@dataclass
class Coordinator:
    """One run. Synchronous PPO and bounded staleness are one loop, configured by `coordinator.max_staleness`."""

    config: PPOConfig
    derived: Derived
    """What follows from `config`."""
    roles: RoleGroups
    state: RunState
    buffer: ReplayBuffer
    calls: ChunkCalls
    pipeline: Pipeline
    weights: WeightSync
    recovery: Recovery
    evaluator: Evaluator | None
    best: BestKeeper
    metrics: MetricsWriter
    sample_saving: SampleSaving
    progress: StageProgress
    stop: StopRequest
    on_evaluation: Callable[[int, Evaluation], None]
    """Writes an evaluation and its step; called in the thread for records."""
    profiler: StepProfiler
    files: RunFiles = field(default_factory=RunFiles)
    pace: SavePace = field(default_factory=lambda: SavePace(0))
    """Of checkpoints by time; that of `recovery`."""
    episodes: EpisodeWatch | None = None
    """The open episodes; None without environments."""
    prompts_used: bool = False
    """Whether the run has ended because it may draw no more prompts."""
    saved_at: int | None = None
    """Step of the checkpoint that the run continued from or last saved, which may still be written."""
    _row: asyncio.Task[None] | None = None
    """The newest row of metrics, until it is written."""
    _kept: frozenset[Place] | None = None
    """Places of the experience that was ready before the last publication; None before a step."""
    _pause_s: float | None = None
    """How long training paused for a checkpoint since the last row of metrics."""
    _save_due: bool = False
    """Whether a checkpoint follows the present step. Decided once, before new chunks are admitted: the clock may find
    one due a moment later."""

    def __post_init__(self) -> None:
        self._learning = Learning(self.config.algorithm, self.derived.shares_backbone, self.roles, self.state,
                                  self.buffer, self.pipeline.ledger, self.progress.warn)

    async def run(self) -> None:
        """Run the remaining steps, or as many as `early_stop` allows.

        Raises:
            RunInterrupted: stopped on request; everything done so far is in a checkpoint.
            WorkerError: workers were lost. If they were learners, `stages.attempts.repeat_attempts` restarts them and
                continues from the last checkpoint.
            GeneratorMismatch: a generator does not compute with the learner's weights.
            RewardError: samples cannot be scored.
            DiskStalled: the disk of the run hangs.
        """
        self.stop.can_save = True
        gc.freeze()  # modules and configuration outlive the loop; exclude them from garbage collection
        try:
            if self.state.unmeasured and await self._evaluate():
                await self._keep_best()
            while not self._ended:
                await self._step_or_stop()
            await self._recorded()
            await self.recovery.settled()
        except asyncio.CancelledError:
            await self.recovery.close(patience_s=0)
            raise
        except WorkerError as error:
            if not self._spares_learners(error):  # ranks that wait for a lost one may not answer for hours
                await self.recovery.close(self.config.cluster.heartbeat_timeout_s)
            raise
        except DiskStalled:
            self.files.hurry()
            raise
        finally:
            gc.unfreeze()
            self.profiler.close()
            await self.sample_saving.close()
            if self._row is not None:
                row, self._row = self._row, None
                await asyncio.gather(row, return_exceptions=True)
            await self.pipeline.close(ENDING_S)
            await self.recovery.close()
            if self.pipeline.journals is not None:
                await self.pipeline.journals.close()

    async def _step_or_stop(self) -> None:
        """One step; after a request to stop, a checkpoint instead. Chunks under way are generated again after a
        resume."""
        await self.recovery.settled(wait=False)
        await self.profiler.begin(self.state.step + 1)
        began = self.roles.clock.now()
        received = traffic.received
        # Without this check a batch that is ready would be trained before the stop, again and again.
        async with self._saved_before_the_end():
            await self._settle_generators()
            lease = None if self.stop.requested else await self.stop.unless_asked(self.pipeline.next_batch())
            if lease is not None:
                await self._require_idle_generators(lease)
        if lease is not None:
            await self._step(lease, began, received)
            return
        if self.pipeline.exhausted and not self.stop.requested:
            await self._end_without_prompts()
            return
        if self.saved_at != self.state.step:
            await self._save()
        await self.recovery.settled()
        raise RunInterrupted(f"stopped by {self.stop.requested} after step {self.state.step} of "
                             f"{self.config.run.steps}; the checkpoint is saved, --resume continues from it")

    async def _require_idle_generators(self, lease: Lease) -> None:
        """`WeightSync.require_idle`, before an update with a batch, which is ready again if an error ends the run."""
        try:
            await self.weights.require_idle()
        except RLHFError:
            self.buffer.give_back(lease)
            raise

    async def _end_without_prompts(self) -> None:
        """What the last step of a run is followed by: its evaluation and its checkpoint."""
        self.state.unmeasured = self.config.evaluation is not None and not self._due(self.config.evaluation.every)
        self.prompts_used = True
        self.progress.note(f"dynamic sampling has drawn all prompts of run.epochs, which were enough for "
                           f"{self.state.step} of {self.config.run.steps} steps")
        if self.state.unmeasured and await self._evaluate():
            await self._keep_best()
        elif self.saved_at != self.state.step:
            await self._save()

    @asynccontextmanager
    async def _saved_before_the_end(self) -> AsyncIterator[None]:
        """If the work fails, and the last step is as it was before, save that step before the run ends."""
        try:
            yield
        except Exception as error:
            # Without a step there is nothing to lose. A checkpoint after a lost worker has a restart try again.
            saves = self._spares_learners(error) or (self.state.step > 0 and not isinstance(error, NOT_SAVED))
            if saves:
                await self._save_beside()
            raise

    async def _save_beside(self) -> None:
        """Save the last step, unless it is, and report how that ends."""
        step = self.state.step
        async with reported(step, self.progress):
            if self.saved_at != step:
                await self.pipeline.close(ENDING_S)
                await self.pipeline.ledger.settled()
                await self.files.records.run(check_open_samples, self, f"step {step}")
                await self._save()
            await self.recovery.settled()

    def _spares_learners(self, error: Exception) -> bool:
        """Whether an error that ends the run is about other workers than the learners."""
        lost = isinstance(error, WorkerError) and bool(error.role) and not self.roles.trains(error.role)
        return lost or isinstance(error, GeneratorMismatch) or error is self.roles.health.irreplaceable_error

    async def make_generators_agree(self) -> bool:
        """Wait for the comparison of generators and learner after the last publication. If a generator does not compute
        with the learner's weights, give up what was sampled since (`Pipeline.resume` starts it again), publish all
        weights once more, and compare all generators. Returns False if that was necessary.

        Raises:
            GeneratorMismatch: a generator still computes with other weights.
        """
        canary = self.weights.canary
        error = None if canary is None else await canary.mismatch()
        if canary is None or error is None:
            return True
        self.progress.warn(f"{error}. All weights are published again, and what was sampled with this version is "
                           "generated again")
        if self._kept is not None:
            await self.pipeline.give_up_since(self._kept, f"sampled when {first_line(error)}")
        async with self.weights.changing():
            await self.weights.publish(self.state.step, resend=True)
        if (again := await canary.mismatch()) is not None:
            raise GeneratorMismatch(f"{again}, also after all weights were published again. Resume the run with "
                                    "--resume; if it happens again, compare vLLM with the learner by `rlhf-ray "
                                    "check-model`, and report it with this message") from error
        return False

    async def _settle_generators(self) -> None:
        """Before anything depends on the samples of the newest version: an update, an evaluation, a checkpoint."""
        if not await self.make_generators_agree():
            self.pipeline.resume()

    async def _step(self, lease: Lease, began: float, received: int) -> None:
        """Learn from a batch, publish, record. `began`, `received`: clock and traffic before its rollout."""
        version = self.state.step
        coef = self.state.kl.value
        depth = self.buffer.stats()
        canary = self.weights.canary
        saving = self.sample_saving.begin(version + 1, lease)
        async with self.weights.changing():
            with self.calls.forward_passes_held():
                if self.weights.phases is not None:
                    await self.weights.phases.learning()
                learned, summaries = await self._learning.learn(lease)
                reached("update_consumed")
                too_old = self.buffer.evict(self.state.step)
                self._kept = frozenset(chunk.place for chunk in self.buffer.ready())
                published = await self.weights.publish(self.state.step)
        reached("publication_over")
        self.state.published = self.state.step
        self.pipeline.return_evicted(too_old)
        self._save_due = self._due(self.config.checkpoint.every) or self.pace.due
        if not self._pauses:
            self.pipeline.admit()
        if self.pipeline.journals is not None:
            await self.pipeline.journals.step_over(self.recovery.committed)
        outcome = StepOutcome(summaries, learned.policy, learned.critic, version, coef, published,
                              traffic.received - received, self.roles.health.metrics(), began, self.roles.clock.now(),
                              self._pause_s, canary.metrics() if canary else {}, self._drawn(lease))
        self._pause_s = None
        await self.profiler.end(self.state.step, began, outcome.ended)
        await self._recorded()
        self._record(outcome, depth, saving)
        self.state.unmeasured = self.config.evaluation is not None and self._due(self.config.evaluation.every)
        if self._pauses:  # `early_stop` may have ended the run since this was asked above
            async with self._saved_before_the_end():
                await self._settle_generators()
        # Evaluation comes first: a run that is killed after its last checkpoint has evaluated it.
        if self.state.unmeasured and await self._evaluate():
            await self._keep_best()
        elif self._saves:
            await self._save()

    def _drawn(self, lease: Lease) -> Drawn | None:
        """What dynamic sampling drew for a batch; warns once if it trains on prompts of equal scores."""
        dynamic = self.config.algorithm.dynamic_sampling
        if dynamic is None:
            return None
        drawn = Drawn.of(lease.chunks, self.config.coordinator.samples_per_prompt, compared_components(self.config))
        if filled := int(drawn.metrics["dynamic/filled"]):
            self.progress.warn_once(
                f"step {self.state.step}: {filled} of {self.config.coordinator.prompts_per_step} prompts have samples "
                "of equal scores, from which nothing is learned: their places were drawn "
                f"{dynamic.max_batches} times (algorithm.dynamic_sampling.max_batches). The prompts are too easy or "
                "too hard by now; dynamic/filled counts them in every step")
        return drawn

    async def _keep_best(self) -> None:
        """Save the present step, which is the best so far."""
        await self._save()
        await self.recovery.settled()
        await self.best.keep()

    async def _save(self) -> None:
        await self._recorded()
        self._pause_s = await self.recovery.save()
        self.saved_at = self.state.step

    async def _recorded(self) -> None:
        """Wait until the last row, and the samples of its step, are on disk. This happens before the next row, and
        before files that must not exist without it, so that the wait is part of a step's time."""
        if self._row is not None:
            row, self._row = self._row, None
            await row

    def _record(self, outcome: StepOutcome, depth: BufferStats, saving: Awaitable[dict[str, float]]) -> None:
        row = step_metrics(outcome, depth, self.roles.clock, self.roles.workers(), self.roles.by_section)
        if self.pipeline.quarantine:
            row["reward/quarantined"] = float(self.pipeline.quarantine.samples)
        if not math.isnan(row["reward/mean"]):  # that of a step whose episodes are all masked says nothing
            self.state.early_stop.observe(self.state.step, row.get("kl/sequence"), row["reward/mean"])
        self._row = asyncio.create_task(self._write(self.state.step, row, saving))
        labels = {"reward": "reward/mean", "gold": "reward/gold", "kl": "kl/sequence",
                  "samples_per_second": "throughput/samples_per_second"}
        self.progress.update(self.state.step, **shown({label: row[name] for label, name in labels.items()
                                                       if name in row}))
        gap = row["rollout/logprob_gap_p99"]
        alarm = self.config.weights.logprob_gap_alarm
        if row["staleness/max"] == 0 and gap > alarm:
            self.progress.warn(f"generators and learner of the same version differ by more than {alarm:g} nats "
                               f"(weights.logprob_gap_alarm) at one token of a hundred, by up to {gap:.2g} at the "
                               "others: their weights or precision differ")

    async def _write(self, step: int, row: dict[str, float], saving: Awaitable[dict[str, float]]) -> None:
        """Write a row of metrics once the step's samples are on disk, or cannot be written."""
        try:
            row |= await saving
        finally:
            await self.files.records.run(self.metrics.write, step, row)

    async def _evaluate(self) -> bool:
        """Evaluate the policy; True if it is the best so far, and not the initial one. If a request to stop interrupts
        it, a resumed run starts with this evaluation."""
        if self.evaluator is None:
            self.state.unmeasured = False
            return False
        await self._recorded()
        self.progress.note(f"evaluating on {self.evaluator.rows} held-out prompts")
        work = self.evaluator.measure()
        # At the end of the run a request to stop does not interrupt the evaluation.
        async with self._saved_before_the_end():
            evaluation = await (work if self._ended else self.stop.unless_asked(work))
            best = evaluation is not None and self.best.consider(self.state.step, evaluation.metrics)
        if evaluation is None:
            return False
        self.state.unmeasured = False
        await self.files.records.run(self.on_evaluation, self.state.step, evaluation)
        return best

    def _due(self, every: int) -> bool:
        """Whether something due every `every` steps (0: only at the end) is due after this one."""
        return self._ended or (every > 0 and self.state.step % every == 0)

    @property
    def _saves(self) -> bool:
        """Whether a checkpoint follows this step: it is due, or the step's row has ended the run early."""
        return self._save_due or self._ended

    @property
    def _pauses(self) -> bool:
        """Whether an evaluation or a checkpoint follows this step; new chunks are admitted after it."""
        return self._saves or (
            self.config.evaluation is not None and self._due(self.config.evaluation.every))

    def open_keys(self) -> list[SampleKey]:
        """Samples that were admitted and not trained: under way, to be generated again, or ready."""
        under_way = [key for chunk in self.buffer.under_way() for key in chunk.keys]
        ready = [key for chunk in self.buffer.ready() for key in chunk.keys]
        return under_way + self.state.returned + ready

    @property
    def stopped_early(self) -> str | None:
        """Why the run ends before its last step, if it does."""
        return self.state.early_stop.reason() if self.state.step < self.config.run.steps else None

    @property
    def _ended(self) -> bool:
        """Whether the present step is the last one."""
        return self.state.step == self.config.run.steps or self.prompts_used or self.stopped_early is not None


def check_open_samples(coordinator: Coordinator, checkpoint: Path | str) -> None:
    """Refuse a checkpoint whose ledger and state disagree on the open samples: some would be lost, or made twice.

    Args:
        checkpoint: for the message.

    Raises:
        CheckpointError: names some of the samples.
    """
    ledger = coordinator.pipeline.ledger
    position = coordinator.state.cursor.position
    remedy = "resume from another checkpoint, or start a new run"
    if unmatched := sorted(key.numbers for key in ledger.open_keys() ^ set(coordinator.open_keys())):
        raise CheckpointError(f"{checkpoint}: its ledger and its state disagree on {len(unmatched)} open samples, such "
                              f"as (epoch, row, sample) {unmatched[0]}; {remedy}")
    if ledger.position() != position:
        raise CheckpointError(f"{checkpoint}: {ledger.position()} prompts of each source are handed out according to "
                              f"its ledger, {position} according to its data cursor; {remedy}")
