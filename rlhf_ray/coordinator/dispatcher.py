"""Dispatch of calls to the workers of a group: least loaded first, repeated on another worker when one is lost."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rlhf_ray.cluster.calls import Call
from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.coordinator.health_monitor import Decision, HealthMonitor
from rlhf_ray.coordinator.scheduler import LeastLoadedScheduler
from rlhf_ray.errors import WorkerLost
from rlhf_ray.observability.spans import StepClock, Task

T = TypeVar("T")


class WorkerDispatcher:
    """Calls to one group. A call whose worker is lost is repeated on another one, with the same arguments: these roles
    are pure functions of them (samples have seeds of their own), so any worker gives the same result."""

    def __init__(self, group: WorkerGroup, health: HealthMonitor) -> None:
        """`health` decides what the loss of a worker means."""
        self.group, self.health = group, health
        self.scheduler = LeastLoadedScheduler(group)

    async def call(self, method: str, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1) -> Call:
        """Call the least loaded worker, and wait for the end of the call.

        Args:
            phase: under which its working time is recorded; not at all when empty.
            work: added to the worker's load during the call.
            outputs: see `WorkerGroup.call`.

        Raises: see `call_and_get`.
        """
        call, _ = await self.call_and_get(None, method, *arguments, phase=phase, work=work, outputs=outputs)
        return call

    async def call_and_get(
        self, index: int | None, method: str, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1,
    ) -> tuple[Call, Any]:
        """As `call`; also get the result at `index` (None: no result).

        Raises:
            WorkerLost: an argument of the call is lost, and must be produced again.
            WorkerError: the workers cannot be kept alive.
            RLHFError: the role's own error.
        """
        while True:
            try:
                return await self.attempt(index, method, *arguments, phase=phase, work=work, outputs=outputs)
            except WorkerLost as error:
                if self.lost(error, work) is not Decision.RETRY:
                    raise

    async def attempt(
        self, index: int | None, method: str, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1,
    ) -> tuple[Call, Any]:
        """One attempt at `call_and_get`, for callers that have work of their own before each of them: they ask `lost`
        whether to repeat it.

        Raises:
            WorkerLost: the worker or an argument of the call is lost.
            RLHFError: as `call_and_get`.
        """
        rank = await self.scheduler.acquire(work)
        try:
            call = self.group.call(rank, method, *arguments, outputs=outputs)
            await finished(call, phase, self.health.clock)
            value = None if index is None else await call.value(index)
            self.scheduler.finished[rank] += 1
            return call, value
        finally:
            self.scheduler.release(rank, work)

    def lost(self, error: WorkerLost, work: int = 0) -> Decision:
        """Report the loss of a call of `work` to the health monitor; returns what it means for the call. A loss in
        another group is not this group's to handle."""
        return self.health.lost(error, work) if error.role == self.group.role else Decision.FAIL


async def retry_on_lost_object(make: Callable[[], Awaitable[T]], most: int) -> T:
    """The result of `make`, which is repeated up to `most` times when an object it needs was lost with a node.

    Raises:
        WorkerLost: an object was lost once more.
    """
    losses = 0
    while True:
        try:
            return await make()
        except WorkerLost as error:
            losses += 1
            if error.kind != "result" or losses > most:
                raise


async def finished(call: Call, phase: str, clock: StepClock) -> Call:
    """Wait for a call without fetching its result, and record its working time under its role and `phase`."""
    if not phase:
        await call.done()
        return call
    with clock.waiting_for(Task(call.role, call.rank, phase, call.started)):
        timing = await call.done()
    clock.add_returned(call.role, timing.seconds, call.rank)
    clock.add_returned(f"phase:{phase}", timing.seconds, call.rank)
    return call
