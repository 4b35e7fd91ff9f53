"""Learners that were lost: all of them made anew, so that the run goes on from its last checkpoint.

One lost rank is enough. What the others hold is worth nothing without it, and weights, optimizer and the coordinator's
state of one moment exist in a checkpoint only. Generators, scorers and the job itself stay as they are.
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
    """Rebuilds the learners, and counts how often it was in vain."""

    def __init__(self, config: ClusterConfig, roles: RoleGroups, store: CheckpointStore,
                 start: Callable[[], Awaitable[None]], warn: Callable[[str], None],
                 files: RunFiles | None = None) -> None:
        """`start` makes newly spawned learners ready for `load`."""
        self._files = files or RunFiles()
        self._config, self._roles, self._store, self._start, self._warn = config, roles, store, start, warn
        self._losses = 0
        self._committed: int | None = None
        """Step of the newest checkpoint when learners were lost last."""

    async def after(self, error: WorkerError) -> None:
        """New learners, without weights worth keeping, if that is what `error` calls for.

        Raises:
            WorkerError: no learner was lost (then `error` itself), or too often without a checkpoint in between.
        """
        while True:
            if not await self._lost_a_learner(error):
                raise error
            await self._count(error)
            where = "its beginning" if self._committed is None else f"the checkpoint of step {self._committed}"
            self._warn(f"{first_line(error).rstrip('.')}. All learners are built again; the run goes on from {where}")
            try:
                await self._build()
                return
            except WorkerError as again:
                error = again

    async def _build(self) -> None:
        await asyncio.gather(*(group.respawn(rank, "the learners are built again") for group in self._roles.learners()
                               for rank in range(len(group))))
        await self._files.checkpoints.run(self._store.clean)  # of a checkpoint that the old ones were writing
        await self._start()

    async def _lost_a_learner(self, error: WorkerError) -> bool:
        """Whether a learner failed. One whose result others miss is asked whether it is there; it may be busy."""
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
            message = (f"learners were lost {self._losses} times {since} without a new one in between "
                       f"(cluster.max_rebuilds={self._config.max_rebuilds}), the last time so: {error}")
            raise WorkerError(message, error.role) from error


async def _answers(call: Call) -> bool:
    try:
        await call.done()
    except WorkerError:
        return False
    return True
