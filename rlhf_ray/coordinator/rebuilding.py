"""Restart of all learners after one was lost, so that the run continues from its last checkpoint.

If one rank is lost, all ranks are replaced: the state of the others is useless without it, and only a checkpoint has
weights, optimizer state and coordinator state of the same step. Generators, scorers and the job continue.
"""

import asyncio
from collections.abc import Awaitable, Callable

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cluster.calls import Call
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.errors import WorkerError, WorkerLost, first_line
from rlhf_ray.files.writer_thread import RunFiles


class Rebuilding:
    """Restarts the learners, and counts restarts without a new checkpoint in between."""

    def __init__(self, config: ClusterConfig, roles: RoleGroups, store: CheckpointStore,
                 start: Callable[[], Awaitable[None]], warn: Callable[[str], None],
                 files: RunFiles | None = None) -> None:
        """`start` prepares new learners for `load`."""
        self._files = files or RunFiles()
        self._config, self._roles, self._store, self._start, self._warn = config, roles, store, start, warn
        self._losses = 0
        self._committed: int | None = None
        """Step of the newest checkpoint at the last loss of a learner."""

    async def after(self, error: WorkerError) -> None:
        """Replace all learners if `error` is the loss of one. The new ones have no weights: restore a checkpoint.

        Raises:
            WorkerError: no learner was lost (then `error` itself), or learners were lost too often without a new
                checkpoint in between.
        """
        while True:
            if not await self._lost_a_learner(error):
                raise error
            await self._count(error)
            where = "the beginning" if self._committed is None else f"the checkpoint of step {self._committed}"
            self._warn(f"{first_line(error).rstrip('.')}. All learners are restarted; the run continues from {where}")
            try:
                await self._build()
                return
            except WorkerError as again:
                error = again

    async def _build(self) -> None:
        await asyncio.gather(*(group.respawn(rank, "all learners are restarted") for group in self._roles.learners()
                               for rank in range(len(group))))
        await self._files.checkpoints.run(self._store.clean)  # remove a checkpoint that the old ones were writing
        await self._start()

    async def _lost_a_learner(self, error: WorkerError) -> bool:
        """Whether a learner failed. If a result is missing, all learners are checked for liveness; they may be busy."""
        if self._roles.trains(error.role):
            return True
        if not (isinstance(error, WorkerLost) and error.kind == "result"):
            return False
        calls = [group.call(rank, "node_host", timeout_s=self._config.heartbeat_timeout_s)
                 for group in self._roles.learners() for rank in range(len(group))]
        return not all(await asyncio.gather(*(_answers(call) for call in calls)))

    async def _count(self, error: WorkerError) -> None:
        newest = await self._files.checkpoints.run(self._store.newest_name)
        committed = newest[0] if newest else None
        self._losses = self._losses + 1 if self._losses and committed == self._committed else 1
        self._committed = committed
        if self._losses > self._config.max_rebuilds:
            since = "since the run began" if committed is None else f"since the checkpoint of step {committed}"
            message = (f"learners were lost {self._losses} times {since} without a new checkpoint "
                       f"(cluster.max_rebuilds={self._config.max_rebuilds}). The last loss: {error}")
            raise WorkerError(message, error.role) from error


async def _answers(call: Call) -> bool:
    try:
        await call.done()
    except WorkerError:
        return False
    return True
