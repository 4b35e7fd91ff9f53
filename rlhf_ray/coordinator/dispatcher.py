"""A group whose workers all answer alike: who is called next, and what happens to calls that a lost worker leaves."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rlhf_ray.cluster.calls import Call
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.errors import RLHFError, WorkerLost
from rlhf_ray.observability.spans import StepClock, Task

T = TypeVar("T")
IDLE_LOOK_S = 0.05
"""Between two looks whether a worker that is given no more calls has answered its last."""


class LeastLoadedScheduler:
    """Which worker of a group to call next: the one with least work under way, the lowest rank among equals."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._load = dict.fromkeys(group.ranks, 0)
        self._order = [(0, rank) for rank in group.ranks]
        """(load, rank) of every worker that is up, in order."""
        self._up = set(group.ranks)

    def take(self, work: int) -> int:
        """A rank that is up, charged with `work` (any unit) until `give_back`.

        Raises:
            IndexError: none is up.
        """
        rank = self._order[0][1]
        self._charge(rank, work)
        return rank

    def give_back(self, rank: int, work: int) -> None:
        """The work is done, or nobody waits for it any more."""
        self._charge(rank, -work)

    def leave_out(self, rank: int) -> None:
        """Give a rank no more work until it is back."""
        if rank in self._up:
            self._up.discard(rank)
            del self._order[bisect_left(self._order, (self._load[rank], rank))]

    def take_back(self, rank: int) -> None:
        """A rank that was left out works again, or one that is new works from now on."""
        self._up.add(rank)
        insort(self._order, (self._load.setdefault(rank, 0), rank))

    def load(self, rank: int) -> int:
        """Work that a rank has not given back."""
        return self._load.get(rank, 0)

    @property
    def any_up(self) -> bool:
        """Whether `take` has somebody to give."""
        return bool(self._order)

    @property
    def up(self) -> list[int]:
        """Ranks that may be given work."""
        return sorted(self._up)

    def _charge(self, rank: int, work: int) -> None:
        """Move a worker to where its new load belongs; there may be hundreds, so by bisection."""
        if rank not in self._up:
            self._load[rank] += work
            return
        del self._order[bisect_left(self._order, (self._load[rank], rank))]
        self._load[rank] += work
        insort(self._order, (self._load[rank], rank))


class WorkerDispatcher:
    """Calls to one group. A call whose worker is lost is made again at another one, with the same arguments: the roles
    here are pure functions of them (samples have seeds of their own), so that it does not matter who answers."""

    def __init__(self, group: WorkerGroup, clock: StepClock) -> None:
        self.group, self.clock, self.now = group, clock, clock.now
        self.scheduler = LeastLoadedScheduler(group)
        self.on_lost: Callable[[WorkerDispatcher, WorkerLost, int], None] | None = None
        """Called with every call that was lost by its worker's fault, and of its work; sees to it that there will be a
        worker again. Where there is nobody to do so, the loss is raised."""
        self.finished: Counter[int] = Counter()
        """Calls that each rank has answered; its restarts are counted between two of them."""
        self._failed: RLHFError | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    async def ask(
        self, method: str, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1,
        again: Callable[[WorkerLost], None] | None = None,
    ) -> Call:
        """A call to the least loaded worker; it has ended.

        Args:
            phase: under which its working time is noted; not at all when empty.
            work: by which the worker is loaded meanwhile.
            outputs: see `WorkerGroup.call`.
            again: told of each loss before the call is made once more.

        Raises: see `ask_for`.
        """
        return (await self.ask_for(None, method, *arguments, phase=phase, work=work, outputs=outputs, again=again))[0]

    async def ask_for(
        self, index: int | None, method: str, *arguments: Any, phase: str = "", work: int = 1, outputs: int = 1,
        again: Callable[[WorkerLost], None] | None = None,
    ) -> tuple[Call, Any]:
        """As `ask`, with one of the call's results, or None.

        Raises:
            WorkerLost: an argument of the call is not there any more: whoever made it must make it again.
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
        """Give a rank no more calls until it is back."""
        self.scheduler.leave_out(rank)

    def take_back(self, rank: int) -> None:
        """A rank that was left out works again."""
        self.scheduler.take_back(rank)
        self._wake()

    async def idle(self, rank: int, patience_s: float) -> bool:
        """Wait until a rank has answered all its calls, `patience_s` at most; whether it has."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        while self.scheduler.load(rank) and loop.time() < until:
            await asyncio.sleep(IDLE_LOOK_S)
        return not self.scheduler.load(rank)

    def fail(self, error: RLHFError) -> None:
        """Raise `error` to whoever asks from now on, or waits for a worker."""
        self._failed = error
        self._wake()

    def interrupt(self, error: RLHFError) -> None:
        """Raise `error` to whoever waits for a worker at this moment: none will come before something else is done."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)

    async def _next(self, work: int) -> int:
        """The rank to call. While none is up somebody is about to bring one back, within deadlines of their own, or to
        give up."""
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
    """What `make` gives; made all over again, `most` times, when something of it lay on a node that is gone.

    Args:
        again: told of each loss before.

    Raises:
        WorkerLost: it was lost once more.
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
    """Wait for a call without fetching its result, and note its working time under its role and `phase`."""
    if not phase:
        await call.done()
        return call
    with clock.waiting_for(Task(call.role, call.rank, phase, call.started)):
        timing = await call.done()
    clock.add_returned(call.role, timing.seconds, call.rank)
    clock.add_returned(f"phase:{phase}", timing.seconds, call.rank)
    return call
