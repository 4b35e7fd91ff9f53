"""Processes of a run that are there although its driver is not. All that a driver starts carries its mark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

MARK = "RLHF_RAY_CHAOS_RUN"
"""Variable in the environment of all processes of a run: which it is."""
GONE_S = 60.0
"""What is left of a driver's processes must be gone so long after its end."""
LOOK_S = 0.2


def left_by(mark: str) -> list[str]:
    """Command lines of a run's processes that are there long after its driver's end. They are killed, so that the next
    start is not blamed for them."""
    until, none = time.monotonic() + GONE_S, 0
    while none < 2 and time.monotonic() < until:  # a process that has only just been started shows no environment yet
        none = 0 if any(marked(mark)) else none + 1
        time.sleep(LOOK_S)
    told = []
    for process in marked(mark):
        with suppress(psutil.NoSuchProcess):
            told.append(f"process {process.pid} ({' '.join(process.cmdline())[:80]})")
            process.kill()
    return told


def kill_marked(mark: str) -> None:
    """End all of a run's processes."""
    for process in marked(mark):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def marked(mark: str) -> Iterator[psutil.Process]:
    """A run's processes."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
