"""Who is to be struck: whether the process is there, at work as the fault asks for, and what the strike did to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from chaos.plan import Fault
from chaos.strikes import Strikes
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.observability.spans import Task

LOOK_S = 0.002
"""Between two looks at who is at work."""
EFFECT_S = 10.0
"""How long the system gets to end or stop a process."""
GONE = "gone"


async def at_work(fault: Fault, coordinator: Coordinator, group: WorkerGroup,
                  spared: Callable[[Fault], bool]) -> tuple[Task, psutil.Process]:
    """A call in the state that the fault asks for, and its worker's process, at the moment to strike. The call is not
    over: the loop's thread, which would hear of it, is here.

    Args:
        spared: whether the victim is to be left alone at present.
    """
    clock, what, seen = coordinator.roles.clock, fault.what, set[Task]()
    while True:
        await asyncio.sleep(LOOK_S)
        calls = {task for task in clock.under_way
                 if (task.role, task.worker, task.phase) == (what.role, fault.rank, what.phase)}
        if not calls or spared(fault) or (process := _process(fault, coordinator, group)) is None:
            continue
        seen |= calls
        oldest = min(calls, key=lambda task: task.since)
        if len(seen) >= fault.sightings and clock.now() - oldest.since >= fault.delay_s:
            return oldest, process


def is_up(process: psutil.Process) -> bool:
    """Whether it is neither gone nor stopped."""
    return state_of(process) not in (GONE, psutil.STATUS_STOPPED)


def note_effect(strikes: Strikes, fault: Fault, process: psutil.Process) -> None:
    """Wait until the process is dead, or stopped, and note it."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < EFFECT_S:
        state = state_of(process)
        if state == GONE or (state == psutil.STATUS_STOPPED and fault.what.stops):
            strikes.add("confirmed", fault=fault.number, state=state, seconds=seconds)
            return
        time.sleep(LOOK_S)


def state_of(process: psutil.Process) -> str:
    """What the system says of it; GONE when it is over, also where nobody has asked about its end."""
    with suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return process.status()
    return GONE


def _process(fault: Fault, coordinator: Coordinator, group: WorkerGroup) -> psutil.Process | None:
    """The worker's process; None while it is down, which is no state to be struck in."""
    processes = group.processes(fault.rank)
    if processes is None or (group.role, fault.rank) in coordinator.roles.healing.down:
        return None
    try:
        process = psutil.Process(processes.pid)
    except psutil.NoSuchProcess:
        return None
    return process if is_up(process) else None
