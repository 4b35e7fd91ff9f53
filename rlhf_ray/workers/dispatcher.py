"""Dispatch of calls to the workers of a group: least loaded first, repeated on another worker when one is lost."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, overload

from rlhf_ray.errors import WorkerError, WorkerLost, first_line
from rlhf_ray.observability.spans import StepClock, Task
from rlhf_ray.workers.calls import AsyncMethod, Call, Deadline, Method, Result, Role
from rlhf_ray.workers.health_monitor import Decision, HealthMonitor
from rlhf_ray.workers.scheduler import LeastLoadedScheduler
from rlhf_ray.workers.worker_group import WorkerGroup

T = TypeVar("T")
PEER_GRACE_S = 5.0
"""Time for the other ranks of a sharded model to end a call after one has failed in it."""


class WorkerDispatcher(Generic[Role]):
    """Calls to one group. A call whose worker is lost is repeated on another one, with the same arguments: these roles
    are pure functions of them (samples have seeds of their own), so any worker gives the same result."""

    def __init__(self, group: WorkerGroup[Role], health: HealthMonitor) -> None:
        """`health` decides what the loss of a worker means."""
        self.group = group
        self.health = health
        self.scheduler = LeastLoadedScheduler(group)
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By the first rank of a sharded model: its ranks take one call at a time, so that all take them in the same
        order."""

    @overload
    async def call(self, method: AsyncMethod[Role, Result], *arguments: Any, phase: str = "", work: int = 1,
                   outputs: int = 1, **named: Any) -> Call[Result]: ...

    @overload
    async def call(self, method: Method[Role, Result], *arguments: Any, phase: str = "", work: int = 1,
                   outputs: int = 1, **named: Any) -> Call[Result]: ...

    async def call(self, method: Any, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1,
                   **named: Any) -> Call[Any]:
        """Call the least loaded worker, and wait for the end of the call.

        Args:
            method: of the role's class.
            phase: under which its working time is recorded; not at all when empty.
            work: added to the worker's load during the call.
            outputs: see `WorkerGroup.call`.

        Raises:
            WorkerLost: an argument of the call is lost, and must be produced again.
            WorkerError: the workers cannot be kept alive.
            RLHFError: the role's own error.
        """
        call, _ = await self._repeated(_nothing, method, *arguments, phase=phase, work=work, outputs=outputs, **named)
        return call

    @overload
    async def value(self, method: AsyncMethod[Role, Result], *arguments: Any, phase: str = "",
                    **named: Any) -> Result: ...

    @overload
    async def value(self, method: Method[Role, Result], *arguments: Any, phase: str = "", **named: Any) -> Result: ...

    async def value(self, method: Any, *arguments: Any, phase: str = "", **named: Any) -> Any:
        """The result of a `call`; raises the same errors."""
        _, value = await self._repeated(Call.value, method, *arguments, phase=phase, **named)
        return value

    async def call_and_get(self, output: int, method: Method[Role, Result], *arguments: Any, phase: str = "",
                           outputs: int, **named: Any) -> tuple[Call[Result], Any]:
        """As `call` of a method with several results, and one of them; raises the same errors."""
        return await self._repeated(lambda call: call.output(output), method, *arguments, phase=phase, outputs=outputs,
                                    **named)

    async def _repeated(self, get: Callable[[Call[Any]], Awaitable[T]], method: Any, *arguments: Any, phase: str = "",
                        work: int = 1, outputs: int = 1, **named: Any) -> tuple[Call[Any], T]:
        while True:
            try:
                return await self._attempt(get, method, *arguments, phase=phase, work=work, outputs=outputs, **named)
            except WorkerLost as error:
                if self.lost(error, work) is not Decision.RETRY:
                    raise

    async def attempt(self, method: AsyncMethod[Role, Result], *arguments: Any, phase: str = "", work: int = 1,
                      ends_with_caller: bool = False, **named: Any) -> Call[Result]:
        """One attempt at `call`, for callers that have work of their own before each of them: they ask `lost` whether
        to repeat it.

        Args:
            ends_with_caller: if the caller is cancelled, end the call at its worker, and wait until it has ended there,
                for at most `cluster.heartbeat_timeout_s`. Not for ranks that hold a model together.

        Raises:
            WorkerLost: the worker or an argument of the call is lost.
            RLHFError: as `call`.
        """
        call, _ = await self._attempt(_nothing, method, *arguments, phase=phase, work=work,
                                      ends_with_caller=ends_with_caller, **named)
        return call

    async def _attempt(self, get: Callable[[Call[Any]], Awaitable[T]], method: Any, *arguments: Any, phase: str,
                       work: int, outputs: int = 1, ends_with_caller: bool = False, **named: Any
                       ) -> tuple[Call[Any], T]:
        rank = await self.scheduler.acquire(work)
        try:
            ranks = self.group.replica(rank)
            if ends_with_caller:
                call = await self._call_to_end(rank, method, *arguments, phase=phase, outputs=outputs, **named)
            else:
                call = await self._call_replica(ranks, method, *arguments, phase=phase, outputs=outputs, **named)
            value = await get(call)
            self.scheduler.finished[rank] += 1
            return call, value
        finally:
            self.scheduler.release(rank, work)

    async def _call_to_end(self, rank: int, method: Any, *arguments: Any, phase: str, outputs: int, **named: Any
                           ) -> Call[Any]:
        """The call, finished. It ends with its caller."""
        call = self.group.call(rank, method, *arguments, outputs=outputs, ends_with_caller=True, **named)
        try:
            return await finished(call, phase, self.health.clock)
        except asyncio.CancelledError:
            loss = await call.end(Deadline(self.health.heartbeat_timeout_s, "cluster.heartbeat_timeout_s"))
            # A worker that does not answer in time may be waiting for another one; detectors find out which.
            if loss is not None and loss.kind != "hung":
                self.lost(loss)
            raise

    async def _call_replica(self, ranks: Sequence[int], method: Any, *arguments: Any, phase: str, outputs: int,
                            **named: Any) -> Call[Any]:
        """The call, finished. Ranks of a sharded model make it together; the first one's results are the call's."""
        if len(ranks) == 1:
            call = self.group.call(ranks[0], method, *arguments, outputs=outputs, **named)
            return await finished(call, phase, self.health.clock)
        first = ranks[0]
        async with self._turns[first]:
            if first not in self.scheduler.up:
                name = method.__name__
                raise WorkerLost(f"{self.group.role}/{first} was lost before {name} had its turn", self.group.role,
                                 first, self.group.incarnation(first), name, "stale")
            calls = [self.group.call(rank, method, *arguments, outputs=outputs, **named) for rank in ranks]
            self._check_in_step(calls, await self._ended(calls, phase))
            return calls[0]

    async def _ended(self, calls: Sequence[Call[Any]], phase: str) -> list[tuple[Call[Any], BaseException | None]]:
        """Wait for the calls of all ranks of a sharded model; returns those that ended, with their errors.

        When one fails, the others may wait for it in a collective call without end, or fail because of it. So they get
        only `PEER_GRACE_S`, and no time at all when a rank is lost.
        """
        tasks = [asyncio.ensure_future(finished(call, phase, self.health.clock)) for call in calls]
        try:
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if waiting and not any(_rank_lost(task.exception()) for task in done):
                await asyncio.wait(waiting, timeout=PEER_GRACE_S)
            return [(call, task.exception()) for call, task in zip(calls, tasks, strict=True) if task.done()]
        finally:
            for task in tasks:
                task.cancel()

    def _check_in_step(
        self, calls: Sequence[Call[Any]], ended: Sequence[tuple[Call[Any], BaseException | None]],
    ) -> None:
        """Raise the error of a call that all ranks of a sharded model made together. All of them are replaced, unless
        they have all ended with results or with the role's own errors, which leave them in step.

        Args:
            ended: see `_ended`.

        Raises:
            WorkerLost: a rank was lost, or failed while others did not end the call.
            RLHFError: the role's own error.
        """
        failed = [(call, error) for call, error in ended if error is not None]
        if not failed:
            return
        for _, error in failed:
            if _rank_lost(error):
                raise error
        call, error = failed[0]
        in_step = len(ended) == len(calls) and not any(isinstance(error, WorkerError) for _, error in failed)
        none_began = len(failed) == len(calls) and all(isinstance(error, WorkerLost) for _, error in failed)
        if in_step or none_began:
            raise error
        broke = WorkerLost(f"{call.worker} failed in a call that all ranks of its model make together: "
                           f"{first_line(error)}", call.role, call.rank, call.fence.incarnation, call.method, "broke",
                           time.monotonic() - call.started)
        if isinstance(error, WorkerLost):  # an argument is lost, and has to be produced again
            self.health.lost(broke)
            raise error
        raise broke from error

    def lost(self, error: WorkerLost, work: int = 0) -> Decision:
        """Report the loss of a call of `work` to the health monitor; returns what it means for the call. A loss in
        another group is not this group's to handle."""
        return self.health.lost(error, work) if error.role == self.group.role else Decision.FAIL


def _rank_lost(error: BaseException | None) -> bool:
    """Whether an error is the loss of a worker rather than of an object."""
    return isinstance(error, WorkerLost) and error.kind != "result"


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


async def _nothing(_: Call[Any]) -> None:
    """Of a call whose result stays in the object store."""


async def finished(call: Call[Result], phase: str, clock: StepClock) -> Call[Result]:
    """Wait for a call without fetching its result, and record its working time under its role and `phase`."""
    if not phase:
        await call.done()
        return call
    with clock.waiting_for(Task(call.role, call.rank, phase, call.started)):
        seconds = await call.done()
    clock.add_returned(call.role, seconds, call.rank)
    clock.add_returned(f"phase:{phase}", seconds, call.rank)
    return call
