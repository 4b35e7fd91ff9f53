"""Signals for workers at chosen moments of a run. The run's own clock says which worker is busy with what; signals go
to the processes that workers name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.update_step import Learning


@dataclass(eq=False)
class WorkerFault:
    """One signal for one process of a worker, while it works on `phase` after `step` updates."""

    worker: str
    phase: str
    step: int
    signal: int
    process: int = 0
    """Which of the worker's processes; 0 is its own, others are those that it has started."""
    pids: tuple[int, ...] = ()
    """The worker's processes, once the signal was sent."""

    def inject(self, coordinator: Coordinator) -> None:
        """Send the signal if this is the moment."""
        role, rank = self.worker.split("/")
        busy = {(task.role, task.worker, task.phase) for task in coordinator.roles.clock.under_way}
        if coordinator.state.step == self.step and (role, int(rank), self.phase) in busy:
            (group,) = [group for group in coordinator.roles.groups() if group.role == role]
            self.pids = tuple(pid for pid, _ in group.processes(int(rank)).members)
            os.kill(self.pids[self.process], self.signal)


@contextmanager
def worker_faults(*faults: WorkerFault):
    """Inject these faults into the runs inside."""
    run = Coordinator.run

    async def watch(coordinator: Coordinator) -> None:
        while left := [fault for fault in faults if not fault.pids]:
            for fault in left:
                fault.inject(coordinator)
            await asyncio.sleep(0.002)

    async def run_and_inject(self: Coordinator) -> None:
        watching = asyncio.create_task(watch(self))
        try:
            await run(self)
        finally:
            watching.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "run", run_and_inject)
        yield


@dataclass
class LearnerFaults:
    """Signals sent to ranks while they update, each once."""

    plan: dict[int, tuple[str, int, signal.Signals]]
    """By step (from 0): role, rank and signal."""
    always: bool = False
    """Whether one is sent again when its step comes again."""
    hit: list[tuple[int, int, bool]] = field(default_factory=list)
    """Of each that was sent: step, pid, and whether the rank was updating."""
    ends: list[tuple[str, float]] = field(default_factory=list)
    """When its update failed: what had become of each process, and seconds since the update began."""

    def wrap(self, update_all):
        """`Learning._update_all` with the fault of its step, a moment after the update began."""
        async def disturbed(learning, lease):
            step = learning._state.step
            fault = self.plan.get(step) if self.always else self.plan.pop(step, None)
            if fault is None:
                return await update_all(learning, lease)
            role, rank, number = fault
            group, clock = getattr(learning._roles, role), learning._roles.clock
            process = psutil.Process(group.processes(rank).pid)

            def inject():
                busy = {(task.role, task.worker, task.phase) for task in clock.under_way}
                self.hit.append((step, process.pid, (group.role, rank, f"{role}_update") in busy))
                process.send_signal(number)

            asyncio.get_running_loop().call_later(0.05, inject)
            began = time.monotonic()
            try:
                return await update_all(learning, lease)
            finally:
                took = time.monotonic() - began
                if number == signal.SIGKILL:  # the system takes it away a moment after Ray has told of it
                    await asyncio.to_thread(psutil.wait_procs, [process], timeout=10)
                self.ends.append((process.status() if process.is_running() else "gone", took))

        return disturbed


def run_with_learner_faults(faults, configure, directory, overrides=(), **sections):
    """The run with these faults; its directory."""
    from rlhf_ray.stages import ppo

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "_update_all", faults.wrap(Learning._update_all))
        ppo.run(load(PPOConfig, configure(directory, **sections), list(overrides)))
    return directory
