"""Heartbeats of workers: a thread in each worker process counts in the memory of Ray's control service, and the driver
looks whether the counts grow.

A worker serves one call at a time and answers no question while it works. A count that stands still belongs to a
process that was stopped, or cut off with its node. A process that lives and hangs is left to the deadline of its call.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import ray

from rlhf_ray.cluster.processes import Processes, own_processes
from rlhf_ray.internals.ray import delete_values, get_value, put_value

PERIOD_S = 1.0
"""Seconds between two counts, and at least between two looks at them."""
LOOKS, LONGEST_LOOK_S = 20, 5.0
"""Looks within a timeout, and at most the seconds between two: a look is a request for each worker."""


def key_of(role: str, rank: int | str = "", incarnation: int | str = "") -> str:
    """The key under which a worker counts in Ray's control service; each run has a namespace of its own."""
    return f"rlhf-ray/heartbeat/{ray.get_runtime_context().namespace}/{role}/{rank}/{incarnation}"


def introduce(_: Any, key: str) -> Processes:
    """Return the worker's processes, and start to count at `key` for as long as the worker's own process lives."""
    threading.Thread(target=_count, args=(key,), daemon=True, name="heartbeat").start()
    return own_processes()


async def count_at(key: str) -> int | None:
    """The count at `key`; None when there is none yet."""
    count = await asyncio.to_thread(get_value, key)
    return None if count is None else int(count)


def forget(role: str) -> None:
    """Delete the counts of a role whose workers are gone; a cluster may outlive many runs."""
    with suppress(Exception):  # the control service may be gone as well
        delete_values(key_of(role).removesuffix("/"))


def _count(key: str) -> None:
    count = 0
    while True:
        count += 1
        with suppress(Exception):  # the control service may be restarting
            put_value(key, str(count))
        time.sleep(PERIOD_S)


class Group(Protocol):
    """What the detector reads of a `worker_group.WorkerGroup`."""

    role: str

    def incarnation(self, rank: int) -> int:
        """Number of the rank's present process."""

    async def heartbeats(self, rank: int) -> int | None:
        """The count of that process; None before it has begun."""


Watched = TypeVar("Watched", bound=Group)


class HeartbeatDetector(Generic[Watched]):
    """Reports workers whose count stands still. Ray itself reports a process that is gone."""

    name = "the watch over workers"

    def __init__(self, watched: Callable[[], Iterable[tuple[Watched, int]]], timeout_s: float,
                 silent: Callable[[Watched, int, float], None]) -> None:
        """
        Args:
            watched: the workers to look at now, as (group, rank).
            timeout_s: how long a count may stand still.
            silent: called with a worker whose count has stood still for longer, and for how many seconds.
        """
        self._watched, self._timeout_s, self._silent = watched, timeout_s, silent
        self._period_s = min(max(PERIOD_S, timeout_s / LOOKS), LONGEST_LOOK_S)
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

    async def _look(self, group: Watched, rank: int, passed: float) -> None:
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
