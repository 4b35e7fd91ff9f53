"""A supervised run with its workers ready: to its end, and again from the last checkpoint when a learner is lost."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rlhf_ray.checkpoint.store import Checkpoint
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.coordinator.learner_restart import LearnerRestart
from rlhf_ray.errors import DiskStalled, WorkerError
from rlhf_ray.observability.faults import note_restart
from rlhf_ray.observability.metrics import NOTHING, MetricsWriter
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.supervised_loop import SupervisedRun


@dataclass(frozen=True)
class SupervisedAttempts:
    """One supervised run over several learner restarts; every attempt has new state."""

    logging: LoggingConfig
    directory: RunDirectory
    learner_restart: LearnerRestart
    build: Callable[[MetricsWriter], SupervisedRun]
    """Makes the run of an attempt."""

    async def run(self, start: Checkpoint | None, resume: bool) -> SupervisedRun:
        """Make the remaining steps and export the model; returns the last attempt.

        Args:
            start: the checkpoint to continue from.
            resume: whether the directory may hold a run, which continues, or starts over without `start`.

        Raises:
            WorkerError: learners were lost too often.
            RunInterrupted: a stop was requested.
        """
        while True:
            try:
                return await self._attempt(start, start.step if start else NOTHING if resume else None)
            except WorkerError as error:
                start, resume = await self.learner_restart.after(error), True

    async def _attempt(self, start: Checkpoint | None, kept: int | None) -> SupervisedRun:
        """An attempt that keeps the metrics up to the step `kept`."""
        records = self.directory.files.records
        metrics = await records.run(MetricsWriter, self.directory.path, self.logging, kept, self.directory.term)
        try:
            run = self.build(metrics)
            if start is not None:
                await run.restore(start.path)
                await records.run(note_restart, self.directory.faults, start.step, self.directory.term)
            await run.train()
            await run.export()
            return run
        finally:
            with suppress(DiskStalled):  # reported already by the first failure
                await records.run(metrics.close)
