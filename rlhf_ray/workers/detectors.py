"""Detectors of workers whose calls would wait until their deadline: those without a heartbeat, and generators that
produce no tokens."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from rlhf_ray.errors import RLHFError
from rlhf_ray.roles.generator import Generator
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.health_monitor import CHECKS, LONGEST_PERIOD_S, GroupScheduler, HealthMonitor
from rlhf_ray.workers.heartbeat import PERIOD_S
from rlhf_ray.workers.worker_group import WorkerGroup

LOOKS = 20
"""Looks at a heartbeat within the timeout."""


class HeartbeatDetector:
    """Reports workers whose count stands still: processes that were stopped, or cut off with their node. Ray itself
    reports a process that is gone; one that lives and hangs is left to the deadline of its call."""

    name = "the watch over workers"

    def __init__(self, watched: Callable[[], Iterable[tuple[WorkerGroup, int]]], timeout_s: float,
                 silent: Callable[[WorkerGroup, int, float], None]) -> None:
        """
        Args:
            watched: the workers to look at now, as (group, rank).
            timeout_s: how long a count may stand still.
            silent: called with a worker whose count has stood still for longer, and for how many seconds.
        """
        self._watched, self._timeout_s, self._silent = watched, timeout_s, silent
        self._period_s = min(max(PERIOD_S, timeout_s / LOOKS), LONGEST_PERIOD_S)
        self._counts: dict[tuple[str, int, int], tuple[int | None, float]] = {}
        """By role, rank and incarnation: the last count, and the seconds since it changed."""

    async def run(self) -> None:
        """Look at the workers until cancelled."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(self._period_s)
            # If this process itself was stopped, it saw no counts change meanwhile.
            passed = min(time.monotonic() - looked, 2 * self._period_s)
            looked = time.monotonic()
            workers = list(self._watched())
            await asyncio.gather(*(self._look(group, rank, passed) for group, rank in workers))
            present = {(group.role, rank, group.incarnation(rank)) for group, rank in workers}
            self._counts = {worker: seen for worker, seen in self._counts.items() if worker in present}

    async def _look(self, group: WorkerGroup, rank: int, passed: float) -> None:
        worker = group.role, rank, group.incarnation(rank)
        try:
            count = await group.heartbeats(rank)
        except Exception:  # the control service does not answer now; the next look may succeed
            return
        last, still_s = self._counts.get(worker, (None, 0.0))
        still_s = still_s + passed if last is not None and count == last else 0.0
        self._counts[worker] = count, still_s
        if still_s > self._timeout_s and group.incarnation(rank) == worker[2]:
            self._silent(group, rank, still_s)


@dataclass
class Progress:
    """What a generator's incarnation had produced when it was last seen to work."""

    incarnation: int
    tokens: int | None
    """None before its first answer."""
    finished: int
    """Calls that its rank had finished."""
    since: float
    """Time of that, by the step clock. Earlier progress may have been missed."""


class TokenProgress:
    """Reports generators that have open requests, the driver's or another worker's, and produce no token for
    `heartbeat_timeout_s`: the process of a stopped engine may still answer and show a heartbeat. While a generator
    loads weights it produces none, and an answer is enough; so it is when no request is open."""

    name = "the watch over generators"

    def __init__(self, scheduler: GroupScheduler, health: HealthMonitor, heartbeat_timeout_s: float) -> None:
        self._scheduler = scheduler
        self._health = health
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._period_s = min(LONGEST_PERIOD_S, heartbeat_timeout_s / CHECKS)
        self._progress: dict[int, Progress] = {}

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.check()

    async def check(self) -> None:
        """Check each generator once that has a long call, of the driver or of another worker. A check costs the driver
        as much as a call."""
        role = self._scheduler.group.role
        calls = {rank: since for (name, rank), (since, _) in self._health.long_calls().items() if name == role}
        publishing = {task.worker for task in self._health.clock.under_way
                      if (task.role, task.phase) == (role, "publish")}
        self._progress = {rank: progress for rank, progress in self._progress.items() if rank in calls}
        await asyncio.gather(*(self._check(rank, since, rank in publishing) for rank, since in calls.items()))

    async def _check(self, rank: int, since: float, publishing: bool) -> None:
        """Check one generator, whose oldest call began at `since` as far as the driver knows; the generator knows its
        oldest open request. `publishing`: it loads weights."""
        group = self._scheduler.group
        now = self._health.clock.now()
        incarnation = group.incarnation(rank)
        finished = self._scheduler.finished[rank]
        last = self._progress.get(rank)
        if last is not None and last.incarnation != incarnation:
            last = None
        if last is not None and last.finished != finished:
            last.finished = finished
            last.since = now
            return
        activity = None
        tokens = None if last is None else last.tokens
        with suppress(RLHFError):  # calls under way raise the error if it died or broke
            activity = await group.call(rank, Generator.activity, deadline=Deadline(self._period_s)).value()
            tokens = activity.tokens
            since = now - activity.oldest_s
        works = activity is not None and (publishing or activity.requests == 0)
        if last is None or tokens != last.tokens or works:
            self._progress[rank] = Progress(incarnation, tokens, finished, now)
            return
        silent_s = now - max(last.since, since)
        if silent_s > self._heartbeat_timeout_s and group.incarnation(rank) == incarnation:
            self._health.silent(group, rank, silent_s,
                                "gave no sign of life" if publishing else "produced no token")
