"""Heartbeats of workers: a thread in each worker process counts in the memory of Ray's control service. The driver
looks whether the counts grow (`workers.detectors`): a worker serves one call at a time and answers no question
while it works.
"""

import asyncio
import threading
import time
from contextlib import suppress

import ray

from rlhf_ray.internals.ray import delete_values, get_value, put_value

PERIOD_S = 1.0
"""Seconds between two counts."""


def key_of(role: str, rank: int | str = "", incarnation: int | str = "") -> str:
    """The key under which a worker counts in Ray's control service; each run has a namespace of its own."""
    return f"rlhf-ray/heartbeat/{ray.get_runtime_context().namespace}/{role}/{rank}/{incarnation}"


def begin(key: str) -> None:
    """Start to count at `key`, for as long as this process lives."""
    threading.Thread(target=_count, args=(key,), daemon=True, name="heartbeat").start()


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
