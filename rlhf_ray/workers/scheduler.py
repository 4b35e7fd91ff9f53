"""Which worker of a group gets the next call: the one with the least work under way, of those that are available.

Ranks that hold a model together count as one worker, under the first of them.
"""

import asyncio
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rlhf_ray.errors import RLHFError


class Ranked(Protocol):
    """Workers with ranks: a `WorkerGroup` of the driver, or the peers of a worker."""

    @property
    def ranks(self) -> list[int]:
        """Present ranks."""

    def replica(self, rank: int) -> list[int]:
        """The ranks that hold one model together with `rank`."""


Group = TypeVar("Group", bound=Ranked)
PREFERRED_LOAD = 1.5
"""Beyond this, the work that a worker's cache saves is less than what waits there for its turn."""
IDLE_POLL_S = 0.05
"""Between two checks whether a worker that gets no more calls has finished its last."""


class LeastLoadedScheduler(Generic[Group]):
    """Chooses the worker of a group with the least work under way; of equals, the one with the lowest rank."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.finished: Counter[int] = Counter()
        """Calls that each rank has finished; consecutive restarts of a rank are counted between two of them."""
        self._load = {rank: 0 for rank in group.ranks if rank == group.replica(rank)[0]}
        self._order = [(0, rank) for rank in self._load]
        """(load, rank) of every available worker, sorted."""
        self._up = set(self._load)
        self.failed: RLHFError | None = None
        """As given to `fail`."""
        self.listeners: list[Callable[[], None]] = []
        """Called after each change of the available ranks, and of `failed`."""
        self._waiting: set[asyncio.Future[None]] = set()

    async def acquire(self, work: int, prefer: int | None = None) -> int:
        """An available rank, whose load includes `work` (any unit) until `release`. While none is available, it waits
        for `take_back`.

        Args:
            prefer: this rank, if it is available and its load with this work is at most `PREFERRED_LOAD` times that of
                the least loaded one.

        Raises:
            RLHFError: as given to `fail` or `interrupt`.
        """
        while self.failed is None:
            if self.any_up:
                least, rank = self._order[0]
                if prefer in self._up and self.load(prefer) + work <= PREFERRED_LOAD * (least + work):
                    rank = prefer
                self.charge(rank, work)
                return rank
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)
        raise self.failed

    def release(self, rank: int, work: int) -> None:
        """Remove work from a rank's load: it is done, or was abandoned."""
        self.charge(rank, -work)

    def leave_out(self, rank: int) -> None:
        """Give a rank no more work until `take_back`."""
        if rank in self._up:
            self._up.discard(rank)
            del self._order[bisect_left(self._order, (self._load[rank], rank))]
            self.notify()

    def take_back(self, rank: int) -> None:
        """Make a rank available: one that was left out, or a new one."""
        self._up.add(rank)
        insort(self._order, (self._load.setdefault(rank, 0), rank))
        self._wake()
        self.notify()

    def fail(self, error: RLHFError) -> None:
        """Raise `error` in every `acquire` from now on, those that wait included."""
        self.failed = error
        self._wake()
        self.notify()

    def interrupt(self, error: RLHFError) -> None:
        """Raise `error` in the calls of `acquire` that wait now: no worker will be available before the caller has
        acted."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)

    async def idle(self, rank: int, timeout_s: float) -> bool:
        """Wait until a rank has finished all its work, at most `timeout_s`; returns whether it has."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self.load(rank) and loop.time() < until:
            await asyncio.sleep(IDLE_POLL_S)
        return not self.load(rank)

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

    def charge(self, rank: int, work: int) -> None:
        """Change a worker's load by work that it was given, here or by others, and its position by bisection: there may
        be hundreds of workers."""
        if rank not in self._up:
            self._load[rank] += work
            return
        del self._order[bisect_left(self._order, (self._load[rank], rank))]
        self._load[rank] += work
        insort(self._order, (self._load[rank], rank))

    def notify(self) -> None:
        """Call the listeners: the available ranks have changed, or the group has."""
        for listener in self.listeners:
            listener()

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
