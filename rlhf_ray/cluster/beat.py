"""A sign of life that a busy process gives, whatever node it is on: a thread that counts where the driver can see it.

Workers serve one call at a time and answer no question while they work. A count that stands still is a process that was
stopped, or cut off with its node; what hangs while its process lives is left to the deadline of its call.
"""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from rlhf_ray.cluster.processes import Processes, own_processes

BEAT_S = 1.0
"""Seconds between two counts."""


def place_of(role: str, rank: int | str = "", incarnation: int | str = "") -> str:
    """Where a worker counts, in the memory of Ray's control service; each run has a namespace of its own."""
    return f"rlhf-ray/beat/{ray.get_runtime_context().namespace}/{role}/{rank}/{incarnation}"


def introduce(_: Any, place: str) -> Processes:
    """A worker's processes; from now on it counts at `place` for as long as its own process lives."""
    threading.Thread(target=_beat, args=(place.encode(),), daemon=True, name="beat").start()
    return own_processes()


async def count_at(place: str) -> int | None:
    """What is counted there so far; None for nothing."""
    found = await asyncio.to_thread(_internal_kv_get, place.encode())
    return None if found is None else int(found)


def forget(role: str) -> None:
    """Clear the counts of a role whose workers are gone; a cluster may outlive many runs."""
    with suppress(Exception):  # it may be gone itself
        _internal_kv_del(place_of(role).removesuffix("/").encode(), del_by_prefix=True)


def _beat(place: bytes) -> None:
    beats = 0
    while True:
        beats += 1
        with suppress(Exception):  # the control service may be restarting; who is silent for long is given up
            _internal_kv_put(place, str(beats).encode())
        time.sleep(BEAT_S)
