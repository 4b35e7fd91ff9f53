"""Detection of generators that produce no tokens: the process of a stopped engine may still answer and show a
heartbeat."""

import asyncio
from dataclasses import dataclass

from rlhf_ray.coordinator.health_monitor import CHECKS, HealthMonitor
from rlhf_ray.coordinator.scheduler import LeastLoadedScheduler
from rlhf_ray.errors import RLHFError

LONGEST_PERIOD_S = 5.0
"""Most seconds between two checks."""


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
    """Reports generators that have a call and produce no token for `heartbeat_timeout_s`. While a generator loads
    weights it produces none, and an answer is enough."""

    name = "the watch over generators"

    def __init__(self, scheduler: LeastLoadedScheduler, health: HealthMonitor, heartbeat_timeout_s: float) -> None:
        self._scheduler, self._health, self._heartbeat_timeout_s = scheduler, health, heartbeat_timeout_s
        self._period_s = min(LONGEST_PERIOD_S, heartbeat_timeout_s / CHECKS)
        self._progress: dict[int, Progress] = {}

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.check()

    async def check(self) -> None:
        """Check each generator once that has a long call. A check costs the driver as much as a call."""
        role = self._scheduler.group.role
        calls = {rank: since for (name, rank), (since, _) in self._health.long_calls().items() if name == role}
        publishing = {task.worker for task in self._health.clock.under_way
                      if (task.role, task.phase) == (role, "publish")}
        self._progress = {rank: progress for rank, progress in self._progress.items() if rank in calls}
        await asyncio.gather(*(self._check(rank, since, rank in publishing) for rank, since in calls.items()))

    async def _check(self, rank: int, since: float, publishing: bool) -> None:
        """Check one generator, whose oldest call began at `since`. `publishing`: it loads weights."""
        group, now = self._scheduler.group, self._health.clock.now()
        incarnation, finished = group.incarnation(rank), self._scheduler.finished[rank]
        last = self._progress.get(rank)
        if last is not None and last.incarnation != incarnation:
            last = None
        if last is not None and last.finished != finished:
            last.finished, last.since = finished, now
            return
        tokens = None if last is None else last.tokens
        try:
            tokens = await group.call(rank, "tokens_made", timeout_s=self._period_s).value()
            answered = True
        except RLHFError:  # calls under way raise the error if it died or broke
            answered = False
        if last is None or tokens != last.tokens or (answered and publishing):
            self._progress[rank] = Progress(incarnation, tokens, finished, now)
            return
        silent_s = now - max(last.since, since)
        if silent_s > self._heartbeat_timeout_s and group.incarnation(rank) == incarnation:
            self._health.silent(group, rank, silent_s,
                                "gave no sign of life" if publishing else "produced no token")
