"""A PPO run with its workers ready: to its end, and again from the last checkpoint whenever learners are lost.

Every object with state of the run is new for each attempt from the checkpoint's contents, so an attempt after a
lost learner is a resume without a restart of the process, and gives the same results.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_ray.checkpoint.store import Checkpoint
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.coordinator.loop import Coordinator, check_open_samples
from rlhf_ray.errors import ConfigError, WorkerError
from rlhf_ray.observability.faults import note_restart
from rlhf_ray.observability.metrics import MetricsWriter
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.attempts import repeat_attempts
from rlhf_ray.stages.evaluation_log import EvaluationLog
from rlhf_ray.stages.run_export import export_run
from rlhf_ray.workers.learner_restart import LearnerRestart

Build = Callable[[MetricsWriter, EvaluationLog, int | None], Coordinator]
"""Makes the coordinator of an attempt that continues after a step (NOTHING: starts over; None: a new run)."""


class RunAttempts:
    """A run from the moment its workers are ready to its last written file."""

    def __init__(self, logging: LoggingConfig, directory: RunDirectory, learner_restart: LearnerRestart,
                 build: Build) -> None:
        self._logging = logging
        self._directory = directory
        self._learner_restart = learner_restart
        self._build = build
        self.coordinator: Coordinator | None = None
        """Of the present attempt; None before the first."""
        self.evaluations = EvaluationLog(directory, None)
        self.seconds = 0.0
        """Seconds spent in the loop."""
        self.samples = 0
        """Samples trained on in that time, including steps that were made twice."""

    async def run(self, start: Checkpoint | None, resume: bool) -> Coordinator:
        """Make the remaining steps and export the model; returns the coordinator of the last attempt.

        Args:
            start: the checkpoint to continue from.
            resume: whether the directory may hold a run, which continues, or starts over without `start`.

        Raises:
            WorkerError: a worker that is not replaced was lost, or learners were lost too often.
            RunInterrupted: a stop was requested.
        """
        return await repeat_attempts(self.attempt, self._directory, self._logging, self._learner_restart, start, resume)

    async def profile(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Profile the next step; see `StepProfiler.requested`.

        Raises:
            ConfigError: no step has begun.
        """
        if self.coordinator is None:
            raise ConfigError("the run has not started its steps yet; ask again when `rlhf-ray status` shows one")
        return await self.coordinator.profiler.requested(arguments)

    async def attempt(self, metrics: MetricsWriter, start: Checkpoint | None, kept: int | None, again: bool
                      ) -> Coordinator:
        """See `attempts.Attempt`."""
        records = self._directory.files.records
        try:
            self.evaluations = await records.run(EvaluationLog, self._directory, kept)
            coordinator = self.coordinator = await records.run(self._build, metrics, self.evaluations, kept)
            if metrics.dropped:
                coordinator.roles.health.log.count_again(metrics.dropped)
            try:
                await restore_checkpoint(coordinator, start, again)
                await records.run(note_restart, self._directory.faults, coordinator.state.step, self._directory.term)
                await self._timed(coordinator)
                if coordinator.pipeline.journals is not None:
                    await coordinator.pipeline.journals.end()
                await export_run(coordinator, self.evaluations, self._directory)
            except WorkerError:
                await coordinator.pipeline.close()  # started again before the loop, which would close it
                await records.run(coordinator.pipeline.ledger.close)
                raise
        except WorkerError:
            if self.coordinator is not None:  # ends a catch-up before the learners are replaced
                await self.coordinator.weights.forget()
            raise
        return coordinator

    async def _timed(self, coordinator: Coordinator) -> None:
        began = time.perf_counter()
        before = coordinator.state.samples
        try:
            await coordinator.run()
        finally:
            self.seconds += time.perf_counter() - began
            self.samples += coordinator.state.samples - before


async def restore_checkpoint(coordinator: Coordinator, start: Checkpoint | None, again: bool) -> None:
    """Restore workers and state from a checkpoint, and publish its weights to the generators.

    Args:
        again: the generators may hold weights of any version; otherwise they hold those that they started with.
    """
    async with coordinator.weights.changing():
        if start:
            await coordinator.recovery.restore(start.path)
        step = coordinator.state.step
        if coordinator.pipeline.journals is not None:
            await coordinator.pipeline.journals.begin(continues=start is not None)
        if again or step:  # they loaded version 0
            await coordinator.weights.publish(step, resend=again)
    await coordinator.make_generators_agree()
    if start is None:
        return
    coordinator.saved_at = step
    await coordinator.files.records.run(check_open_samples, coordinator, start.path)
    coordinator.progress.note(f"resuming after step {step}")
    coordinator.pipeline.resume()
    if (warning := await coordinator.best.resume(step)) is not None:
        coordinator.progress.warn(warning)
