"""Heartbeats of workers: a thread in each worker process counts in the memory of Ray's control service.

A worker serves one call at a time and answers no question while it works. A count that stands still belongs to a
process that was stopped, or cut off with its node. A process that lives and hangs is left to the deadline of its call.
"""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import ray

from rlhf_ray.cluster.processes import Processes, own_processes
from rlhf_ray.internals.ray import delete_values, get_value, put_value

BEAT_S = 1.0
"""Seconds between two counts."""


def place_of(role: str, rank: int | str = "", incarnation: int | str = "") -> str:
    """The key under which a worker counts in Ray's control service; each run has a namespace of its own."""
    return f"rlhf-ray/beat/{ray.get_runtime_context().namespace}/{role}/{rank}/{incarnation}"


def introduce(_: Any, place: str) -> Processes:
    """Return the worker's processes, and start to count at `place` for as long as the worker's own process lives."""
    threading.Thread(target=_beat, args=(place,), daemon=True, name="beat").start()
    return own_processes()


async def count_at(place: str) -> int | None:
    """The count at `place`; None when there is none yet."""
    count = await asyncio.to_thread(get_value, place)
    return None if count is None else int(count)


def forget(role: str) -> None:
    """Delete the counts of a role whose workers are gone; a cluster may outlive many runs."""
    with suppress(Exception):  # the control service may be gone as well
        delete_values(place_of(role).removesuffix("/"))


def _beat(place: str) -> None:
    beats = 0
    while True:
        beats += 1
        with suppress(Exception):  # the control service may be restarting
            put_value(place, str(beats))
        time.sleep(BEAT_S)
