"""The driver's side of calls between workers: it gives the workers of one role handles to those of another, and learns
of their calls and losses.

It follows the schedulers of both groups. When a peer was given up, has a successor, was added or gets no new calls, it
sends a new table to all callers. When a caller was given up, it tells all peers, which then refuse that process and end
its calls; a peer that starts later is told before callers get its handle.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlhf_ray.errors import ConfigError, RLHFError, WorkerLost
from rlhf_ray.observability.spans import Task
from rlhf_ray.workers.actor_class import Process
from rlhf_ray.workers.calls import Call, Caller, Deadline
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import CHECKS, LONGEST_PERIOD_S
from rlhf_ray.workers.peers import Peer, PeerReport, PeerTable


class PeerTables:
    """Keeps the tables of one group's workers about another group up to date. A `Detector` of the health monitor, for
    as long as the callers work.

    Example:
        tables = PeerTables(runners, generators, heartbeat_timeout_s=60.0)
        await tables.send_first()
        health.register(runners.scheduler, tables.introduce)
        async with health.at_work([*detectors, tables]):
            ...
    """

    name = "the watch over calls between workers"

    def __init__(self, callers: WorkerDispatcher[Any], peers: WorkerDispatcher[Any],
                 heartbeat_timeout_s: float) -> None:
        """
        Args:
            callers: their class is asynchronous, and takes a `PeerGroup` of the peers' role as an argument by name.

        Raises:
            ConfigError: several peers hold a model together.
        """
        sharded = [rank for rank in peers.group.ranks if len(peers.group.replica(rank)) > 1]
        if sharded:
            raise ConfigError(
                f"{callers.group.role} cannot call {peers.group.role}/{sharded[0]}, which holds a model together with "
                "other ranks: they take their calls in one order, which only the driver gives them; set its shards "
                "to 1")
        self._callers = callers
        self._peers = peers
        self._health = peers.health
        self._heartbeat = Deadline(heartbeat_timeout_s, "cluster.heartbeat_timeout_s")
        self._period_s = min(LONGEST_PERIOD_S, heartbeat_timeout_s / CHECKS)
        self._number = 0
        self._introduced: dict[int, int] = {}
        """Rank -> incarnation of callers that have had a table."""
        self._accepted: dict[int, int] = {}
        """Rank of a caller that was lost -> its first incarnation that peers shall not refuse."""
        self._told: set[tuple[int, int, int, int]] = set()
        """Rank and incarnation of a peer, and rank and incarnation of the caller before which it was told to refuse."""
        self._changes_seen = True
        self._introductions = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        for scheduler in (callers.scheduler, peers.scheduler):
            scheduler.listeners.append(self._changed)

    async def send_first(self) -> None:
        """Give all callers their first table, once callers and peers have started."""
        await asyncio.gather(*(self.introduce(rank, lambda: None) for rank in self._callers.group.ranks))

    async def introduce(self, rank: int, readmit: Callable[[], None]) -> str:
        """Give a caller that has just started its first table, then readmit it (`health_monitor.Ready`)."""
        incarnation = self._introduced[rank] = self._callers.group.incarnation(rank)
        if incarnation > 1:
            self._accepted[rank] = incarnation
            self._tell_whom_to_refuse()
        await self._send_table(rank).done()
        readmit()
        self._introductions.set()
        return ""

    async def run(self) -> None:
        """Take reports of all callers until cancelled."""
        listened: set[tuple[int, int]] = set()
        async with asyncio.TaskGroup() as listening:
            while True:
                self._introductions.clear()
                for process in set(self._introduced.items()) - listened:
                    listened.add(process)
                    listening.create_task(self._listen(*process))
                await self._introductions.wait()

    def _changed(self) -> None:
        """A scheduler has changed. What the change is about is complete after the present step of the event loop: a
        worker is left out first, and given up then."""
        if self._changes_seen:
            self._changes_seen = False
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._changes_seen = True
        group = self._callers.group
        in_use = []
        for rank, incarnation in list(self._introduced.items()):
            if rank not in group.ranks:
                del self._introduced[rank]
            elif group.incarnation(rank) != incarnation:
                continue  # its successor is introduced when it has started
            elif group.handle(rank).fence.closed is None:
                in_use.append(rank)
            else:
                self._accepted[rank] = incarnation + 1
        self._tell_whom_to_refuse()
        for rank in in_use:
            self._send(self._send_table(rank))

    def _tell_whom_to_refuse(self) -> None:
        """Tell every process of a peer, also one that gets no new calls, which processes of callers were given up. None
        is told twice."""
        group = self._peers.group
        present = {(rank, group.incarnation(rank)) for rank in group.ranks if group.handle(rank).fence.closed is None}
        wanted = {(*peer, *caller) for peer in present for caller in self._accepted.items()}
        for peer, _, rank, incarnation in sorted(wanted - self._told):
            self._send(group.own_call(peer, Process.refuse_callers_before,
                                      Caller(self._callers.group.role, rank, incarnation), deadline=self._heartbeat))
        self._told = wanted

    def _send_table(self, rank: int) -> Call[None]:
        """Send the present table to a caller."""
        group = self._callers.group
        self._number += 1
        table = PeerTable(self._number, Caller(group.role, rank, group.incarnation(rank)), self._present_peers(),
                          self._peers.scheduler.failed)
        return group.own_call(rank, Process.update_peers, self._peers.group.role, table, deadline=self._heartbeat)

    def _present_peers(self) -> dict[int, Peer]:
        available = set(self._peers.scheduler.up)
        peers = {}
        for rank in self._peers.group.ranks:
            worker = self._peers.group.handle(rank)
            actor = worker.actor if rank in available else None
            peers[rank] = Peer(worker.fence.incarnation, worker.fence.closed, actor)
        return peers

    def _send(self, call: Call[None]) -> None:
        """Wait for a call in the background. If its worker is lost, other calls to it notice that."""
        async def sent() -> None:
            with suppress(RLHFError):
                await call.done()

        task = asyncio.create_task(sent())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _listen(self, rank: int, incarnation: int) -> None:
        """Take a caller's reports until its process is lost."""
        group = self._callers.group
        deadline = Deadline(self._period_s + self._heartbeat.seconds, self._heartbeat.field)
        calls = _CallsOfCaller(self._peers)
        try:
            while group.incarnation(rank) == incarnation:
                asked = group.own_call(rank, Process.report_peers, self._peers.group.role, self._period_s,
                                       deadline=deadline)
                try:
                    calls.take(await asked.value())
                except WorkerLost as error:
                    if error.kind in ("hung", "result"):
                        continue  # busy or stopped, which its other calls show; or its answer was lost with a node
                    self._health.lost(error)
                    return
        finally:
            calls.take(PeerReport([], [], []))


class _CallsOfCaller:
    """The calls of one caller's process to its peers, as the driver's clock and scheduler know them."""

    def __init__(self, peers: WorkerDispatcher[Any]) -> None:
        self._peers = peers
        self._tasks: set[Task] = set()
        self._load: Counter[int] = Counter()

    def take(self, report: PeerReport) -> None:
        """Take over a report: work under way takes the place of that of the report before."""
        role = self._peers.group.role
        scheduler = self._peers.scheduler
        clock = self._peers.health.clock
        now = clock.now()
        for call in report.finished:
            scheduler.finished[call.rank] += 1
            ended = now - call.ended_s
            clock.add(role, ended - call.seconds, ended, call.rank)
        clock.under_way -= self._tasks
        self._tasks = {Task(role, call.rank, call.method, now - call.seconds) for call in report.under_way}
        clock.under_way |= self._tasks
        for rank, work in self._load.items():
            scheduler.release(rank, work)
        self._load = Counter()
        for call in report.under_way:
            self._load[call.rank] += call.work
        for rank, work in self._load.items():
            scheduler.charge(rank, work)
        for error, work in report.losses:
            self._peers.health.lost(error, work)
