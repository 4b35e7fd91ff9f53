"""Restart of all learners after one was lost, so that the run continues from its last checkpoint.

If one rank is lost, all ranks are replaced: the state of the others is useless without it, and only a checkpoint has
weights, optimizer state and coordinator state of the same step. Generators, scorers and the job continue.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from rlhf_ray.checkpoint.store import Checkpoint, CheckpointStore
from rlhf_ray.errors import RunInterrupted, WorkerError, first_line
from rlhf_ray.files.writer_thread import RunFiles
from rlhf_ray.workers.health_monitor import Decision, HealthMonitor
from rlhf_ray.workers.worker_group import WorkerGroup


class StopState(Protocol):
    """What a restart has to know and to tell about a request to stop the run (`coordinator.stop.StopRequest`)."""

    requested: str | None
    """Name of the signal, or of another reason; None while no stop is requested."""
    can_save: bool
    """Whether there is a state to save before the run ends."""


class LearnerRestart:
    """Restarts the learners, and counts restarts without a new checkpoint in between."""

    def __init__(self, limit: int, health: HealthMonitor, learners: Sequence[WorkerGroup], store: CheckpointStore,
                 start: Callable[[], Awaitable[None]], warn: Callable[[str], None], stop: StopState,
                 files: RunFiles | None = None) -> None:
        """
        Args:
            limit: `cluster.max_learner_restarts`.
            health: decides whose loss it was.
            start: prepares new learners for `load`.
            stop: when a stop is requested, learners are not restarted.
        """
        self._files = files or RunFiles()
        self._limit = limit
        self._health = health
        self._learners = learners
        self._store = store
        self._start = start
        self._warn = warn
        self._stop = stop
        self._losses = 0
        self._committed: int | None = None
        """Step of the newest checkpoint at the last loss of a learner."""

    async def after(self, error: WorkerError) -> Checkpoint | None:
        """Replace all learners if `error` is the loss of one. The new ones have no weights.

        Returns:
            The checkpoint to restore; None if there is none yet.

        Raises:
            WorkerError: no learner was lost (then `error` itself), or learners were lost too often without a new
                checkpoint in between.
            RunInterrupted: a stop was requested.
        """
        began = time.perf_counter()
        learner_lost = await self._is_learners(error)
        try:
            if self._stop.requested:
                raise RunInterrupted(f"stopped by {self._stop.requested} when a worker was lost; --resume continues "
                                     f"from the last checkpoint, or starts over when there is none: {error}") from error
            if not learner_lost:
                raise error
            self._stop.can_save = False  # the last checkpoint is the state to continue from
            await self._restart(error)
        except BaseException as end:
            if learner_lost:
                why = f"stopped by {self._stop.requested}" if self._stop.requested else first_line(end)
                self._health.log.learners_lost(error, time.perf_counter() - began,
                                               f"the run ended before they were restarted: {why}")
            raise
        self._health.log.learners_lost(error, time.perf_counter() - began)
        return await self._files.checkpoints.run(self._store.latest)

    async def _restart(self, error: WorkerError) -> None:
        """Replace all learners, again if one is lost meanwhile."""
        while True:
            await self._count(error)
            where = "the beginning" if self._committed is None else f"the checkpoint of step {self._committed}"
            self._warn(f"{first_line(error).rstrip('.')}. All learners are restarted; the run continues from {where}")
            try:
                await self._replace_all()
                return
            except WorkerError as again:
                if not await self._is_learners(again):
                    raise
                error = again

    async def _is_learners(self, error: WorkerError) -> bool:
        return await self._health.decide(error) is Decision.RESTART_LEARNERS

    async def _replace_all(self) -> None:
        await asyncio.gather(*(group.respawn(rank, "all learners are restarted") for group in self._learners
                               for rank in group.ranks))
        await self._files.checkpoints.run(self._store.clean)  # remove a checkpoint that the old ones were writing
        await self._start()

    async def _count(self, error: WorkerError) -> None:
        newest = await self._files.checkpoints.run(self._store.newest_name)
        committed = newest[0] if newest else None
        self._losses = self._losses + 1 if self._losses and committed == self._committed else 1
        self._committed = committed
        if self._losses > self._limit:
            since = "since the run began" if committed is None else f"since the checkpoint of step {committed}"
            message = (f"learners were lost {self._losses} times {since} without a new checkpoint "
                       f"(cluster.max_learner_restarts={self._limit}). The last loss: {error}")
            raise WorkerError(message, error.role) from error
