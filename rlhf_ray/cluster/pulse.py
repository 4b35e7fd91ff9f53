"""Signs of life of workers that serve one call at a time, and so answer no question while they work.

A thread in each worker's process counts (`cluster.beat`). A count that stands still is a process that was stopped, or
cut off with its node; of a process that is gone Ray tells at once. What hangs while its process lives is left to the
deadline of the call.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import ray
from ray.experimental.internal_kv import _internal_kv_get

from rlhf_ray.cluster.beat import BEAT_S
from rlhf_ray.cluster.group import WorkerGroup


class Pulse:
    """Watches the workers of some groups, each incarnation from `begin` on, and gives up those that stand still."""

    def __init__(self, groups: Sequence[WorkerGroup], lease_s: float) -> None:
        """`lease_s`: how long a count may stand still."""
        self._groups, self._lease_s = groups, lease_s
        self._run = ray.get_runtime_context().namespace  # each run has its own
        self._seen: dict[str, tuple[bytes | None, float]] = {}
        """By key, the count seen last, and for how long it has been that, in seconds."""

    async def begin(self) -> None:
        """Let every worker count; to be called whenever they were started."""
        calls = [group.call(rank, "begin_beating", self._key(group, rank))
                 for group in self._groups for rank in range(len(group))]
        await asyncio.gather(*(call.value() for call in calls))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look after the workers during the enclosed work. Calls to one that is given up fail with `WorkerLost`."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            # If this process itself was stopped, nobody could be seen moving meanwhile.
            passed = min(time.monotonic() - looked, 2 * BEAT_S)
            looked = time.monotonic()
            for group in self._groups:
                for rank in range(len(group)):
                    with suppress(Exception):  # who gets no answer learns nothing about others
                        await self._look(group, rank, passed)

    async def _look(self, group: WorkerGroup, rank: int, passed: float) -> None:
        key = self._key(group, rank)
        count = await asyncio.to_thread(_internal_kv_get, key.encode())
        last, still_s = self._seen.get(key, (None, 0.0))
        still_s = still_s + passed if last is not None and count == last else 0.0
        self._seen[key] = count, still_s
        if still_s > self._lease_s:
            group.give_up(rank, f"its process has stood still for {still_s:.0f} s (cluster.lease_s)")

    def _key(self, group: WorkerGroup, rank: int) -> str:
        return f"rlhf-ray/beat/{self._run}/{group.role}/{rank}/{group.incarnation(rank)}"
