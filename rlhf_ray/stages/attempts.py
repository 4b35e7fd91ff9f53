"""Attempts at a run whose workers are ready: again from the last checkpoint whenever learners are lost."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from rlhf_ray.checkpoint.store import Checkpoint
from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import DiskStalled, WorkerError
from rlhf_ray.observability.metrics import NOTHING, MetricsWriter
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.workers.learner_restart import LearnerRestart

R = TypeVar("R")
Attempt = Callable[[MetricsWriter, Checkpoint | None, int | None, bool], Awaitable[R]]
"""Makes the remaining steps, given the writer of metrics, the checkpoint to continue from, the step up to which files
keep what they have (NOTHING: the run starts over; None: a new run), and whether it is not the first attempt. All state
of the run is new for an attempt."""


async def repeat_attempts(attempt: Attempt[R], directory: RunDirectory, logging: LoggingConfig,
                          restart: LearnerRestart, start: Checkpoint | None, resume: bool) -> R:
    """The result of the first attempt in which no learner is lost.

    Args:
        start: the checkpoint to continue from.
        resume: whether the directory may hold a run, which continues, or starts over without `start`.

    Raises:
        WorkerError: a worker that is not replaced was lost, or learners were lost too often.
    """
    records = directory.files.records
    again = False
    while True:
        kept = start.step if start else NOTHING if resume or again else None
        try:
            metrics = await records.run(MetricsWriter, directory.path, logging, kept, directory.term)
            try:
                return await attempt(metrics, start, kept, again)
            finally:
                with suppress(DiskStalled):  # reported already by the first failure
                    await records.run(metrics.close)
        except WorkerError as error:
            start = await restart.after(error)
            again = True
