"""The training loop of a supervised stage: updates, evaluations, checkpoints, best step and export."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.checkpoint.state_files import check_complete, load_state, save_state
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.stages import ProcessRewardConfig, RewardModelConfig, SFTConfig
from rlhf_ray.coordinator.best_checkpoint import BestKeeper, BestSoFar
from rlhf_ray.coordinator.recovery import (
    NOT_SAVED,
    STATE,
    Geometry,
    SavePace,
    parts_on_disk,
    reported,
    whole_or_nothing,
)
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.data.contents import Contents, check_contents
from rlhf_ray.errors import RunInterrupted, WorkerError, WorkerLost
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.progress import StageProgress
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.roles.supervised_learner import SupervisedLearner
from rlhf_ray.stages.run_export import export_learner
from rlhf_ray.workers.calls import Call
from rlhf_ray.workers.worker_group import WorkerGroup

SupervisedConfig = SFTConfig | RewardModelConfig | ProcessRewardConfig

AHEAD = 2
"""Updates submitted before the first has finished, so that learners do not wait for the driver."""


@dataclass
class SupervisedRun:
    """One supervised run."""

    config: SupervisedConfig
    name: str
    """Prefix of its metrics: "sft", "reward_model" or "process_reward"."""
    learners: WorkerGroup
    directory: RunDirectory
    store: CheckpointStore
    metrics: MetricsWriter
    progress: StageProgress
    stop: StopRequest
    card: Callable[[int, Mapping[str, float]], ModelCardInfo]
    """The model card for a step and its last evaluation."""
    contents: Contents
    """Digest of each data set."""
    geometry: Geometry
    """Saved for `check_resume`."""
    measured_first: bool = False
    """Measure the model before training, because it was trained for this already."""
    step: int = 0
    best: BestSoFar = field(default_factory=BestSoFar)
    evaluation: dict[str, float] = field(default_factory=dict)
    """The latest one."""
    unmeasured: bool = False
    """Whether an evaluation of the present step is due."""

    def __post_init__(self) -> None:
        self._pace = SavePace(self.config.checkpoint.every_minutes)

    @cached_property
    def keeper(self) -> BestKeeper:
        """Keeps the best step's checkpoint and model."""
        return BestKeeper(self.config.checkpoint, self.directory, self.store, self.best, self._export_model)

    async def train(self) -> dict[str, float]:
        """Make the remaining updates; returns the last evaluation. The model is also measured before training with
        `checkpoint.best_metric`, as the value to beat, and with `measured_first`.

        Raises:
            RunInterrupted: a stop was requested; a checkpoint of the last finished step exists.
            DiskStalled: the disk of the run hangs.
        """
        self.stop.can_save = True
        if self.step == 0:
            self.unmeasured = bool(self.config.checkpoint.best_metric or self.measured_first)
        if self.unmeasured and await self._evaluate():
            await self._keep_best()
        while self.step < self.config.run.steps:
            until = self._next_pause()
            await self._train_until(until)
            if self.stop.requested and self.step < until:
                await self.save()
                raise RunInterrupted(f"stopped by {self.stop.requested} after step {self.step} of "
                                     f"{self.config.run.steps}; the checkpoint is saved, --resume continues from it")
            self.unmeasured = self._due(self.config.training.eval_every)
            if self.unmeasured and await self._evaluate():
                await self._keep_best()
            elif self._due(self.config.checkpoint.every) or self._pace.due:
                await self.save()
        if not self.evaluation and await self._evaluate():  # resumed after its last step, whose checkpoint exists
            await self.keeper.keep()
        return self.evaluation

    async def _keep_best(self) -> None:
        """Save the present step, which is the best so far."""
        await self.save()
        await self.keeper.keep()

    async def _train_until(self, step: int) -> None:
        """Updates up to `step`, a few submitted ahead; when a stop is requested, or a checkpoint is due by time, ends
        after the submitted ones."""
        under_way: list[list[Call]] = []
        first = submitted = self.step

        def submits() -> bool:
            pauses = self.stop.requested or (submitted > first and self._pace.due)
            return submitted < step and len(under_way) < AHEAD and not pauses

        while submits() or under_way:
            while submits():
                submitted += 1
                under_way.append(self.learners.call_all(SupervisedLearner.update, submitted))
            stats = (await asyncio.gather(*(call.value() for call in under_way.pop(0))))[0]
            self.step = stats.step
            row = {f"{self.name}/{key}": value for key, value in stats.metrics.items()}
            row[f"{self.name}/skipped_steps"] = float(stats.skipped)
            row |= {"throughput/tokens_per_second": stats.tokens / stats.seconds, "time/step": stats.seconds}
            await self.directory.files.records.run(self.metrics.write, self.step, row)
            self.progress.update(self.step, loss=stats.metrics["loss"],
                                 tokens_per_second=row["throughput/tokens_per_second"])

    async def _evaluate(self) -> bool:
        """Measure the model on held-out rows; True when it is the best so far, and not the initial model. If that
        fails, the step is saved, and a resumed run starts with this evaluation."""
        try:
            metrics: dict[str, float] = (await self.learners.values(SupervisedLearner.evaluate))[0]
            best = self.keeper.consider(self.step, metrics)
        except Exception as error:
            answered = isinstance(error, WorkerError) and not isinstance(error, WorkerLost)
            if self.step and (answered or not isinstance(error, NOT_SAVED)):
                await self._save_beside()
            raise
        self.unmeasured = False
        if metrics:
            await self.directory.files.records.run(self.metrics.write, self.step,
                                         {f"eval/{key}": value for key, value in metrics.items()})
            when = "" if self.step else " before training:"
            self.progress.note(f"held-out{when} " + ", ".join(f"{key} {value:.4g}" for key, value in metrics.items()))
        self.evaluation = metrics
        return best

    async def _save_beside(self) -> None:
        """Save the present step after an error of its evaluation, and report how that ends."""
        limit_s = self.config.cluster.heartbeat_timeout_s
        async with reported(self.step, self.progress):
            try:
                async with asyncio.timeout(limit_s):
                    await self.learners.values(SupervisedLearner.save_progress)
            except TimeoutError:  # it waits in the evaluation for the rank that failed
                raise WorkerError(f"a rank of {self.learners.role} did not end its evaluation within "
                                  f"cluster.heartbeat_timeout_s={limit_s:g}", self.learners.role) from None
            await self.save()

    async def save(self) -> None:
        """Write the checkpoint of the present step."""
        checkpoints = self.directory.files.checkpoints
        self._pace.begin()
        directory = await checkpoints.run(self.store.begin, self.step)
        async with whole_or_nothing(self.directory.files, self.store, directory, self.step):
            await self.learners.values(SupervisedLearner.begin_save, str(directory.absolute() / self.learners.role))
            await parts_on_disk([self.learners], checkpoints.timeout_s)
            await checkpoints.run(save_state, directory / STATE, {
                "step": self.step, "best": self.best.state_dict(), "unmeasured": self.unmeasured,
                "contents": self.contents, "geometry": dict(self.geometry)})
        await checkpoints.run(self.store.commit, directory, self.step)
        self._pace.end()

    async def restore(self, path: Path) -> None:
        """Continue from the verified checkpoint at `path`.

        Raises:
            CheckpointError: it was written by another version, or the data has changed since.
        """
        state = load_state(path / STATE)
        check_complete(state, ("step", "best", "unmeasured", "contents"), str(path))
        check_contents(state["contents"], self.contents)
        await self.learners.values(SupervisedLearner.load, str(path.absolute() / self.learners.role))
        self.step, self.unmeasured = state["step"], state["unmeasured"]
        self.best.load_state_dict(state["best"])
        self.progress.note(f"resuming after step {self.step}")
        if (warning := await self.keeper.resume(self.step)) is not None:
            self.progress.warn(warning)

    async def export(self) -> None:
        """Write model/ in Hugging Face format, and adapter/ in peft's where adapters were trained."""
        card = self.card(self.step, self.evaluation)
        await export_learner(self.learners, self.config.learner, self.directory, card)

    async def _export_model(self, place: Path) -> None:
        """Write the present model to the directory `place`, in Hugging Face format."""
        card = self.card(self.step, self.evaluation)
        await self.learners.values(SupervisedLearner.export, str(place.absolute()), card, self.directory.term)

    def _next_pause(self) -> int:
        """The next step at which something other than updates happens."""
        paces = (self.config.training.eval_every, self.config.checkpoint.every)
        return min([self.config.run.steps, *((self.step // every + 1) * every for every in paces if every)])

    def _due(self, every: int) -> bool:
        return self.step == self.config.run.steps or (every > 0 and self.step % every == 0)
