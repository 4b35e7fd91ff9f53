"""Detects learners that stand still, by their heartbeats (`cluster.beat`).

Learners are watched all the time, not only during their calls: a rank that waits for another rank looks as busy as that
one. Ray itself reports a process that is gone.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rlhf_ray.cluster.beat import BEAT_S
from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.observability.background_task import OnFailure, background_task, log_failure


class Pulse:
    """Watches the workers of some groups, each incarnation separately, and gives up those that stand still."""

    def __init__(self, groups: Sequence[WorkerGroup], heartbeat_timeout_s: float,
                 on_failure: OnFailure = log_failure) -> None:
        """
        Args:
            heartbeat_timeout_s: how long a count may stand still.
            on_failure: called when the watch itself fails.
        """
        self._groups, self._heartbeat_timeout_s, self._on_failure = groups, heartbeat_timeout_s, on_failure
        self._seen: dict[tuple[str, int, int], tuple[int | None, float]] = {}
        """By role, rank and incarnation: the last count, and the seconds since it changed."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the workers during the enclosed work. Calls to a worker that is given up fail with `WorkerLost`."""
        async with background_task("the watch over learners", self._watch, self._on_failure, essential=True):
            yield

    async def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            # If this process itself was stopped, it saw no counts change meanwhile.
            passed = min(time.monotonic() - looked, 2 * BEAT_S)
            looked = time.monotonic()
            for group in self._groups:
                for rank in range(len(group)):
                    await self._look(group, rank, passed)

    async def _look(self, group: WorkerGroup, rank: int, passed: float) -> None:
        worker = group.role, rank, group.incarnation(rank)
        try:
            count = await group.sign_of_life(rank)
        except Exception:  # the control service does not answer now; the next look may succeed
            return
        last, still_s = self._seen.get(worker, (None, 0.0))
        still_s = still_s + passed if last is not None and count == last else 0.0
        self._seen[worker] = count, still_s
        if still_s > self._heartbeat_timeout_s:
            group.give_up(rank, f"its process has stood still for {still_s:.0f} s (cluster.heartbeat_timeout_s)")
