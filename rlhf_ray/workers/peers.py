"""Calls from a worker to the workers of another role, its peers.

The coordinator gives a worker an empty `PeerGroup` as an argument of its class, and later tables of handles
(`workers.peer_tables`): one when the worker has started, and one after each change among its peers. The group calls
these handles as the driver calls its own, and reports losses to the driver, whose health monitor alone replaces
workers.
"""

import asyncio
import inspect
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, NamedTuple, overload

from rlhf_ray.errors import RLHFError, WorkerError, WorkerLost
from rlhf_ray.workers.calls import AsyncMethod, Caller, Deadline, Fence, Method, Result, Role, WorkerHandle
from rlhf_ray.workers.scheduler import LeastLoadedScheduler

STICKY_KEYS = 10_000
"""Keys whose peer is remembered; the longest unused ones are forgotten."""
MOST_FINISHED = 10_000
"""Answered calls that are kept for the next report; the oldest are forgotten, as when nobody asks for one."""
MOST_LOST_RESULTS = 3
"""A call is repeated so many times because its result was lost with a node."""


class Peer(NamedTuple):
    """A peer's process, as a table describes it."""

    incarnation: int
    given_up: str | None
    """Why its answers are refused; None while it is in use."""
    actor: Any
    """Ray's handle; None while it gets no new calls."""


class PeerTable(NamedTuple):
    """What the coordinator tells one worker about its peers."""

    number: int
    """Tables are numbered. One that arrives after a later one is ignored."""
    caller: Caller
    """The process that receives the table."""
    peers: Mapping[int, Peer]
    """By rank."""
    error: RLHFError | None
    """Why no peer will be available again."""


class PeerCall(NamedTuple):
    """A call to a peer, as the driver is told."""

    rank: int
    method: str
    seconds: float
    """Its duration so far, or until its end."""
    work: int
    ended_s: float = 0.0
    """Seconds since its end."""


class PeerReport(NamedTuple):
    """What a worker tells the driver about the calls to its peers."""

    losses: list[tuple[WorkerLost, int]]
    """Peers that the worker lost and has no successor of, and the work repeated because of each since the last report.
    A loss is repeated in each report, since a report may be lost."""
    under_way: list[PeerCall]
    finished: list[PeerCall]
    """Calls that a peer has answered since the last report."""


@dataclass
class _Attempt:
    """A call to a peer under way."""

    worker: WorkerHandle
    method: str
    began: float
    """By the monotonic clock."""
    work: int


class PeerGroup(Generic[Role]):
    """The workers of one role as a worker of another role sees them. It is used from one event loop.

    Arguments and results travel by value. A call whose peer is lost is repeated at another one with the same arguments:
    the methods of these roles are pure functions of them. When the caller of an asynchronous method is cancelled, the
    call ends at the peer too.

    Example:
        class EpisodeRunner:
            def __init__(self, generators: PeerGroup[Generator]) -> None:
                self._generators = generators

            async def turn(self, episode: str, request: SampleRequest) -> Completion:
                [completion] = await self._generators.call(
                    Generator.sample, [request], sticky=episode, deadline=Deadline(60.0))
                return completion
    """

    def __init__(self, role: str, deadline: Deadline, to_end: Deadline) -> None:
        """
        Args:
            role: of the peers.
            deadline: of a call that has none of its own.
            to_end: how long a peer may take to end a call whose caller is cancelled. A peer that exceeds it is lost.
        """
        self.role = role
        self.deadline = deadline
        self._to_end = to_end
        self._caller: Caller | None = None
        self._number = 0
        """Of the newest table."""
        self._workers: dict[int, WorkerHandle] = {}
        self._scheduler = LeastLoadedScheduler(self)
        self._sticky: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        """Key -> rank and incarnation of the peer that its last call went to."""
        self._numbers = count()
        self._under_way: dict[int, _Attempt] = {}
        self._finished: deque[tuple[_Attempt, float]] = deque(maxlen=MOST_FINISHED)
        """Answered calls since the last report, and when each ended."""
        self._losses: dict[int, WorkerLost] = {}
        """By rank, until a table has a successor."""
        self._repeated: dict[int, int] = {}
        """By rank, the work repeated since the last report."""
        self._news = asyncio.Event()

    @property
    def ranks(self) -> list[int]:
        """Ranks of known peers."""
        return sorted(self._workers)

    def replica(self, rank: int) -> list[int]:
        """Peers hold whole models (`PeerTables`)."""
        return [rank]

    @overload
    async def call(self, method: AsyncMethod[Role, Result], *args: Any, work: int = 1, sticky: Hashable = None,
                   deadline: Deadline | None = None, **named: Any) -> Result: ...

    @overload
    async def call(self, method: Method[Role, Result], *args: Any, work: int = 1, sticky: Hashable = None,
                   deadline: Deadline | None = None, **named: Any) -> Result: ...

    async def call(self, method: Any, *args: Any, work: int = 1, sticky: Hashable = None,
                   deadline: Deadline | None = None, **named: Any) -> Any:
        """The result of a method at the peer with the least work of this worker. If the caller is cancelled, it waits
        until an asynchronous method has ended at the peer.

        Args:
            method: of the peers' class.
            work: added to the peer's load during the call.
            sticky: calls with the same key go to the same process, whose prefix cache has the key's earlier tokens,
                while it is available and not much busier than others (`scheduler.PREFERRED_LOAD`).
            deadline: how long one peer may take to answer, and how long to wait until one is available; the group's if
                None. A peer that exceeds it is lost.

        Raises:
            WorkerLost: this process itself was given up, or results were lost with nodes repeatedly.
            WorkerError: no peer was available in time, or none will be again.
            RLHFError: the peer's own error.
        """
        deadline = deadline or self.deadline
        lost_results = 0
        while True:
            worker = await self._acquire(method.__name__, work, sticky, deadline)
            try:
                return await self._attempt(worker, work, method, *args, deadline=deadline, **named)
            except WorkerLost as error:
                if (error.role, error.rank) != (worker.role, worker.rank):
                    raise  # this process was given up
                lost_results += error.kind == "result"
                if lost_results > MOST_LOST_RESULTS:
                    raise
                if error.kind != "result":
                    self._lost(worker, error, work)
            finally:
                self._scheduler.release(worker.rank, work)

    def update(self, table: PeerTable) -> None:
        """Take over a table: give up peers that the coordinator has given up, stop calling those that get no new calls,
        and call new ones."""
        if table.number <= self._number:
            return
        self._number = table.number
        self._caller = table.caller
        for rank, worker in list(self._workers.items()):
            peer = table.peers.get(rank)
            if peer is None or peer.incarnation != worker.fence.incarnation:
                self._leave(worker, "it was replaced or removed")
                del self._workers[rank]
                self._losses.pop(rank, None)
            elif peer.given_up is not None:
                self._leave(worker, peer.given_up)
            elif peer.actor is None:
                self._scheduler.leave_out(rank)
        for rank, peer in table.peers.items():
            if peer.actor is not None and peer.given_up is None:
                self._take(rank, peer, table.caller)
        if table.error is not None:
            self._scheduler.fail(table.error)

    async def report(self, wait_s: float) -> PeerReport:
        """What happened since the last report: at once when a peer was lost, otherwise after `wait_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        self._news.clear()
        now = time.monotonic()
        losses = [(error, self._repeated.pop(rank, 0)) for rank, error in self._losses.items()]
        under_way = [PeerCall(a.worker.rank, a.method, now - a.began, a.work) for a in self._under_way.values()]
        finished = [PeerCall(a.worker.rank, a.method, ended - a.began, a.work, now - ended)
                    for a, ended in self._finished]
        self._finished.clear()
        return PeerReport(losses, under_way, finished)

    async def _acquire(self, method: str, work: int, sticky: Hashable, deadline: Deadline) -> WorkerHandle:
        """The peer for a call, whose load includes `work`."""
        try:
            async with asyncio.timeout(deadline.seconds):
                rank = await self._scheduler.acquire(work, self._rank_of(sticky))
        except TimeoutError:
            field = f" ({deadline.field})" if deadline.field else ""
            raise WorkerError(f"no {self.role} was available for {method} within {deadline.seconds:g} s{field}",
                              self.role) from None
        worker = self._workers[rank]
        if sticky is not None:
            self._sticky[sticky] = (rank, worker.fence.incarnation)
            self._sticky.move_to_end(sticky)
            if len(self._sticky) > STICKY_KEYS:
                self._sticky.popitem(last=False)
        return worker

    def _rank_of(self, sticky: Hashable) -> int | None:
        """The rank that has a key's earlier tokens, unless its process was replaced."""
        if sticky is None or sticky not in self._sticky:
            return None
        rank, incarnation = self._sticky[sticky]
        worker = self._workers.get(rank)
        return rank if worker is not None and worker.fence.incarnation == incarnation else None

    async def _attempt(self, worker: WorkerHandle, work: int, method: Any, *args: Any, deadline: Deadline,
                       **named: Any) -> Any:
        number = next(self._numbers)
        attempt = _Attempt(worker, method.__name__, time.monotonic(), work)
        self._under_way[number] = attempt
        call = worker.call(method, *args, deadline=deadline, ends_with_caller=inspect.iscoroutinefunction(method),
                           **named)
        try:
            result = await call.value()
            self._finished.append((attempt, time.monotonic()))
            return result
        except asyncio.CancelledError:
            if (loss := await call.end(self._to_end)) is not None:
                self._lost(worker, loss, 0)
            raise
        finally:
            del self._under_way[number]

    def _lost(self, worker: WorkerHandle, error: WorkerLost, work: int) -> None:
        """A call of `work` to a peer was lost. Its other calls end too, and the driver is told."""
        rank = worker.rank
        if self._workers.get(rank) is not worker:
            return  # a table has its successor
        self._repeated[rank] = self._repeated.get(rank, 0) + work
        if rank not in self._losses:
            self._losses[rank] = error
            self._leave(worker, str(error))
        self._news.set()

    def _leave(self, worker: WorkerHandle, reason: str) -> None:
        self._scheduler.leave_out(worker.rank)
        worker.fence.close(reason)

    def _take(self, rank: int, peer: Peer, caller: Caller) -> None:
        """Call an available peer from now on, unless this worker has lost this process of it."""
        worker = self._workers.get(rank)
        if worker is None:
            worker = WorkerHandle(self.role, rank, peer.actor, Fence(peer.incarnation), caller)
            self._workers[rank] = worker
        if worker.fence.closed is None and rank not in self._scheduler.up:
            self._scheduler.take_back(rank)
