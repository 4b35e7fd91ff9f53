"""Which processes and shared-memory segments there are because of this test process."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

from rlhf_ray.cluster.shared_memory import SHM, mapped_by

spared: set[str] = set()
"""Marks in the command lines of processes that are nobody's fault while a cluster is open on purpose."""


def descendants(wait_s: float = 15.0) -> list[str]:
    """Command lines of living descendants after they had `wait_s` seconds to end, without Python's own helpers."""
    until = time.monotonic() + wait_s
    while (left := _living()) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def _living() -> list[str]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(
                    mark in command for mark in ("multiprocessing", *spared)):
                found.append(command)
        except psutil.NoSuchProcess:
            continue
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm that belong to this user."""
    found = set()
    for entry in os.scandir("/dev/shm"):
        with suppress(FileNotFoundError):
            if entry.stat().st_uid == os.getuid():
                found.add(entry.name)
    return found


def abandoned(before: set[str], wait_s: float = 3.0) -> set[str]:
    """Segments that are new since `before` and that no living process has mapped (others may run engines too), looked
    at for `wait_s` seconds: a segment of somebody else's is there a moment before it is mapped."""
    until, new = time.monotonic() + wait_s, shared_memory() - before
    while new := _unmapped(new):
        if time.monotonic() > until:
            return new
        time.sleep(0.2)
    return set()


def _unmapped(names: set[str]) -> set[str]:
    """By what they are and not by name: a semaphore that somebody uses is mapped under another one."""
    mapped = mapped_by(psutil.pids()) if names else set()
    return {name for name in names & shared_memory() if SHM + name not in mapped}
