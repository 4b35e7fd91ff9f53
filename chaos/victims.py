"""The processes into which faults are injected: finding one in the required state, and confirming the effect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from chaos.driver_under_test import POLL_S, DriverUnderTest
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.nodes import HEARTBEAT_TIMEOUT_S, Node
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.observability.spans import Task
from rlhf_ray.workers.worker_group import WorkerGroup

TOO_FAST = 4
"""Calls that may end before the delay of a fault; a fault that waits for a slower one is injected into the next. How
long calls take depends on the machine, its load, and what the policy has learned."""
EFFECT_S = 10.0
"""How long the operating system gets to end or stop a process."""
GONE = "gone"
REPLACED_S = 120.0
"""Within this time the run must have replaced a partitioned worker."""
ENDED_S = 45.0
"""Within this time after it returns, a partitioned node must have learned that it was given up, and ended."""
PARTITION_POLL_S = 0.05


async def call_under_way(fault: Fault, phase: str, coordinator: Coordinator, group: WorkerGroup,
                         spared: Callable[[], bool]) -> tuple[Task, psutil.Process]:
    """Wait for a call in the state that the fault requires; returns it and the process of its worker. The call cannot
    finish before this coroutine yields: its reply is handled on the loop's thread.

    Args:
        phase: of the call.
        group: the victim's.
        spared: whether no fault may be injected into the victim at present.
    """
    clock, seen = coordinator.roles.clock, set[Task]()
    while True:
        await asyncio.sleep(POLL_S)
        calls = {task for task in clock.under_way
                 if (task.role, task.worker, task.phase) == (group.role, fault.rank, phase)}
        if not calls or spared() or (process := _process(fault, coordinator, group)) is None:
            continue
        seen |= calls
        oldest = min(calls, key=lambda task: task.since)
        delay_s = fault.delay_s if len(seen) <= fault.sightings + TOO_FAST else 0.0
        if len(seen) >= fault.sightings and clock.now() - oldest.since >= delay_s:
            return oldest, process


def is_up(process: psutil.Process) -> bool:
    """Whether the process is neither gone nor stopped."""
    return state_of(process) not in (GONE, psutil.STATUS_STOPPED)


def unnoticed(driver: DriverUnderTest) -> bool:
    """Whether a victim is dead or stopped and not replaced yet, perhaps because nobody has called it since."""
    return any(group.incarnation(rank) == incarnation and not is_up(process)
               for group, rank, incarnation, process in driver.victims)


def log_effect(injections: InjectionLog, fault: Fault, process: psutil.Process, stops: bool) -> None:
    """Wait until the process is dead, or stopped, and log it. `stops`: whether it shall be stopped, not killed."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < EFFECT_S:
        state = state_of(process)
        if state == GONE or (state == psutil.STATUS_STOPPED and stops):
            injections.add("confirmed", fault=fault.number, state=state, seconds=seconds)
            return
        time.sleep(POLL_S)


def state_of(process: psutil.Process) -> str:
    """The process's status as psutil names it; GONE when it is over, zombies included."""
    with suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return process.status()
    return GONE


def cut_off_until_replaced(injections: InjectionLog, fault: Fault, node: Node, replaced: Callable[[], bool]) -> None:
    """Cut a node off, and let it return after the heartbeat timeout, once the run has `replaced` its worker. Logs
    "confirmed" when it is cut off, and "recovered" when it was until it returned and its processes have ended since."""
    began, processes = time.monotonic(), node.cut_off()
    try:
        if _wait(node.is_cut_off, EFFECT_S):
            injections.add("confirmed", fault=fault.number, state="cut off", seconds=time.monotonic() - began)
        _wait(lambda: replaced() and time.monotonic() - began > HEARTBEAT_TIMEOUT_S, REPLACED_S)
        cut_off = replaced() and node.is_cut_off()
    finally:
        node.reconnect()
    seconds = time.monotonic() - began
    if _wait(lambda: _ended(processes), ENDED_S) and cut_off:
        injections.add("recovered", fault=fault.number, processes=len(processes), seconds=seconds)


def _process(fault: Fault, coordinator: Coordinator, group: WorkerGroup) -> psutil.Process | None:
    """The worker's process; None while the worker is down."""
    processes = group.processes(fault.rank)
    if processes is None or (group.role, fault.rank) in coordinator.roles.health.down:
        return None
    try:
        process = psutil.Process(processes.pid)
    except psutil.NoSuchProcess:
        return None
    return process if is_up(process) else None


def _ended(processes: Sequence[psutil.Process]) -> bool:
    """Whether all are over. A raylet is this process's child: until it is reaped, its workers consider it alive, and do
    not end."""
    psutil.wait_procs(processes, timeout=0)
    return all(state_of(process) == GONE for process in processes)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds or the time is over; returns whether it holds."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(PARTITION_POLL_S)
    return holds
