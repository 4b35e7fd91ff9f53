"""Dispatch of calls to the workers of a group: least loaded first, repeated on another worker when one is lost."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rlhf_ray.cluster.calls import Call
from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.errors import RLHFError, WorkerLost
from rlhf_ray.observability.spans import StepClock, Task

T = TypeVar("T")
IDLE_LOOK_S = 0.05
"""Between two checks whether a worker that gets no more calls has finished its last."""


class LeastLoadedScheduler:
    """Chooses the worker of a group with the least work under way; of equals, the one with the lowest rank."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._load = dict.fromkeys(group.ranks, 0)
        self._order = [(0, rank) for rank in group.ranks]
        """(load, rank) of every available worker, sorted."""
        self._up = set(group.ranks)

    def take(self, work: int) -> int:
        """An available rank, whose load includes `work` (any unit) until `give_back`.

        Raises:
            IndexError: no rank is available.
        """
        rank = self._order[0][1]
        self._charge(rank, work)
        return rank

    def give_back(self, rank: int, work: int) -> None:
        """Remove work from a rank's load: it is done, or was abandoned."""
        self._charge(rank, -work)

    def leave_out(self, rank: int) -> None:
        """Give a rank no more work until `take_back`."""
        if rank in self._up:
            self._up.discard(rank)
            del self._order[bisect_left(self._order, (self._load[rank], rank))]

    def take_back(self, rank: int) -> None:
        """Make a rank available: one that was left out, or a new one."""
        self._up.add(rank)
        insort(self._order, (self._load.setdefault(rank, 0), rank))

    def load(self, rank: int) -> int:
        """Work of a rank that is under way."""
        return self._load.get(rank, 0)

    @property
    def any_up(self) -> bool:
        """Whether a rank is available."""
        return bool(self._order)

    @property
    def up(self) -> list[int]:
        """Available ranks."""
        return sorted(self._up)

    def _charge(self, rank: int, work: int) -> None:
        """Change a worker's load, and its position by bisection: there may be hundreds of workers."""
        if rank not in self._up:
            self._load[rank] += work
            return
        del self._order[bisect_left(self._order, (self._load[rank], rank))]
        self._load[rank] += work
        insort(self._order, (self._load[rank], rank))


class WorkerDispatcher:
    """Calls to one group. A call whose worker is lost is repeated on another one, with the same arguments: these roles
    are pure functions of them (samples have seeds of their own), so any worker gives the same result."""

    def __init__(self, group: WorkerGroup, clock: StepClock) -> None:
        self.group, self.clock, self.now = group, clock, clock.now
        self.scheduler = LeastLoadedScheduler(group)
        self.on_lost: Callable[[WorkerDispatcher, WorkerLost, int], None] | None = None
        """Called with every lost call and its work, if the worker caused the loss; replaces the worker. If it is None,
        the loss is raised."""
        self.finished: Counter[int] = Counter()
        """Calls that each rank has finished; consecutive restarts of a rank are counted between two of them."""
        self._failed: RLHFError | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    async def call(
        self, method: str, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1,
        again: Callable[[WorkerLost], None] | None = None,
    ) -> Call:
        """Call the least loaded worker, and wait for the end of the call.

        Args:
            phase: under which its working time is recorded; not at all when empty.
            work: added to the worker's load during the call.
            outputs: see `WorkerGroup.call`.
            again: called with each loss before the call is repeated.

        Raises: see `call_and_get`.
        """
        call, _ = await self.call_and_get(
            None, method, *arguments, phase=phase, work=work, outputs=outputs, again=again)
        return call

    async def call_and_get(
        self, index: int | None, method: str, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1,
        again: Callable[[WorkerLost], None] | None = None,
    ) -> tuple[Call, Any]:
        """As `call`; also get the result at `index` (None: no result).

        Raises:
            WorkerLost: an argument of the call is lost, and must be produced again.
            WorkerError: the workers cannot be kept alive.
            RLHFError: the role's own error.
        """
        while True:
            rank = await self._next(work)
            try:
                call = self.group.call(rank, method, *arguments, outputs=outputs)
                await finished(call, phase, self.clock)
                value = None if index is None else await call.value(index)
                self.finished[rank] += 1
                return call, value
            except WorkerLost as error:
                if error.kind == "result" or error.role != self.group.role or self.on_lost is None:
                    raise
                self.on_lost(self, error, work)
                if again is not None:
                    again(error)
            finally:
                self.scheduler.give_back(rank, work)

    def leave_out(self, rank: int) -> None:
        """Give a rank no more calls until `take_back`."""
        self.scheduler.leave_out(rank)

    def take_back(self, rank: int) -> None:
        """Make a rank that was left out available."""
        self.scheduler.take_back(rank)
        self._wake()

    async def idle(self, rank: int, patience_s: float) -> bool:
        """Wait until a rank has finished all its calls, at most `patience_s`; returns whether it has."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        while self.scheduler.load(rank) and loop.time() < until:
            await asyncio.sleep(IDLE_LOOK_S)
        return not self.scheduler.load(rank)

    def fail(self, error: RLHFError) -> None:
        """Raise `error` in all later calls, and in those that wait for a worker."""
        self._failed = error
        self._wake()

    def interrupt(self, error: RLHFError) -> None:
        """Raise `error` in the calls that wait for a worker now: none will be available before the caller has acted."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)

    async def _next(self, work: int) -> int:
        """The rank to call. While none is available, `on_lost` replaces one within a deadline, or calls `fail`."""
        while True:
            if self._failed is not None:
                raise self._failed
            if self.scheduler.any_up:
                return self.scheduler.take(work)
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


async def kept(make: Callable[[], Awaitable[T]], most: int, again: Callable[[WorkerLost], None] | None = None) -> T:
    """The result of `make`, which is repeated up to `most` times when an object it needs was lost with a node.

    Args:
        again: called with each loss before `make` is repeated.

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
            if again is not None:
                again(error)


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
