"""What was cut off and comes back: it goes on where it was stopped, when the run has long had somebody in its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from chaos.plan import Fault
from chaos.settings import LEASE_S
from chaos.strikes import Strikes
from chaos.victims import GONE, state_of

GIVEN_UP_S = 120.0
"""The run must have put somebody else in its place so long after it was cut off."""
HEARD_S = 45.0
"""So long after it came back it must have heard that it was given up, and ended."""
LOOK_S = 0.05


def come_back(strikes: Strikes, fault: Fault, cut_off: Sequence[psutil.Process], replaced: Callable[[], bool]) -> None:
    """Let stopped processes go on, beyond the lease and once they are `replaced`; note it when all were stopped until
    then, and have ended by themselves since."""
    began = time.monotonic()
    try:
        _wait(lambda: replaced() and time.monotonic() - began > LEASE_S, GIVEN_UP_S)
        meant = replaced() and all(state_of(process) == psutil.STATUS_STOPPED for process in cut_off)
    finally:
        for process in cut_off:
            with suppress(psutil.NoSuchProcess):
                process.resume()
    seconds = time.monotonic() - began
    if _wait(lambda: _ended(cut_off), HEARD_S) and meant:
        strikes.add("recovered", fault=fault.number, processes=len(cut_off), seconds=seconds)


def _ended(processes: Sequence[psutil.Process]) -> bool:
    """Whether all are over. A raylet is this process's child: before somebody asks about its end, its workers take it
    for alive, and stay."""
    psutil.wait_procs(processes, timeout=0)
    return all(state_of(process) == GONE for process in processes)


def _wait(for_what: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (found := for_what()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return found
