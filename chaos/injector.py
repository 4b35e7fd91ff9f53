"""Injects faults from inside the driver, the only process that knows which worker executes which call, and its pid.

Faults are injected one after the other, each as soon as it is due and its victim in the state that the kind requires.
The next fault does not wait until the victim of the last one has been replaced.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from chaos.checkpoint_damage import valid_checkpoints
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.mounts import fill_disk
from chaos.nan_injection import nan_order_file, order_nan
from chaos.nodes import Nodes
from chaos.reward_service import failure_order_file, order_failure
from chaos.victims import POLL_S, call_under_way, is_up, log_effect, resume_partitioned
from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.failpoints import VARIABLE

CHECKPOINT_POLL_S = 0.1


class Injector:
    """The faults of one driver process."""

    def __init__(self, faults: Sequence[Fault], injections: InjectionLog, nodes: Nodes | None = None) -> None:
        """`nodes`: the nodes that may be lost, if the run has several."""
        self._left = [fault for fault in faults if fault.details.target != "network"]  # Ray loses messages
        self._planned, self._injections, self._nodes = bool(self._left), injections, nodes
        self._confirming: set[asyncio.Task[None]] = set()
        self._learners_lost = False
        """Whether a fault hit a learner in this loop: a new loop begins when all learners are restarted."""

    def install(self) -> None:
        """Inject the remaining faults into every training loop of this process."""
        run, step = Coordinator.run, Coordinator._step_or_stop

        async def step_after_faults(coordinator: Coordinator) -> None:
            while self._must_wait(coordinator):
                await asyncio.sleep(POLL_S)
            await step(coordinator)

        async def run_with_faults(coordinator: Coordinator) -> None:
            self._learners_lost = False
            self._injections.add("loop", pid=os.getpid())
            injecting = asyncio.create_task(self._inject(coordinator), name="chaos")
            try:
                await run(coordinator)
            finally:
                injecting.cancel()
                with suppress(asyncio.CancelledError):
                    await injecting

        Coordinator.run = run_with_faults  # type: ignore[method-assign, assignment]
        Coordinator._step_or_stop = step_after_faults  # type: ignore[method-assign, assignment]

    def _must_wait(self, coordinator: Coordinator) -> bool:
        """Whether the next fault is due and its victim still down from an earlier one, or no fault is left and a worker
        is down or cut off. Otherwise training would continue without them, and might end before they are back."""
        if not self._planned:
            return False
        down = {worker for worker, loss in coordinator.roles.health.down.items() if not loss.recorded}
        if not self._left:
            return bool(down or self._confirming)
        fault = self._left[0]
        return coordinator.state.step >= fault.step and (fault.details.role, fault.rank) in down

    async def _inject(self, coordinator: Coordinator) -> None:
        while self._left:
            fault = self._left[0]
            while coordinator.state.step < fault.step:
                await asyncio.sleep(POLL_S)
            await self._wait_for_checkpoints(fault, coordinator)
            if fault.details.target == "failpoint":
                self._arm_failpoint(fault, coordinator)
            elif fault.details.target == "disk":
                self._fill_disk(fault, coordinator)
            elif fault.details.target == "service":
                self._order_reward_failure(fault, coordinator)
            elif fault.details.target == "numbers":
                self._order_nan(fault, coordinator)
            elif fault.details.target == "driver":
                await self._signal_driver(fault, coordinator)
            else:
                await self._inject_into_worker(fault, coordinator)
            self._left.pop(0)  # at once: the loss of a learner ends this task, and another one continues with the rest
            while failure_order_file(self._injections).exists() or nan_order_file(self._injections).exists():
                await asyncio.sleep(POLL_S)

    async def _wait_for_checkpoints(self, fault: Fault, coordinator: Coordinator) -> None:
        """Wait for the valid checkpoints that the fault needs; the newest may have been damaged before."""
        root = coordinator.recovery.store.root
        while fault.valid_checkpoints and len(await asyncio.to_thread(valid_checkpoints, root)) < \
                fault.valid_checkpoints:
            await asyncio.sleep(CHECKPOINT_POLL_S)

    def _log(self, fault: Fault, coordinator: Coordinator, **fields: Any) -> None:
        self._injections.add("injected", fault=fault.number, kind=fault.kind, step=coordinator.state.step, **fields)

    def _arm_failpoint(self, fault: Fault, coordinator: Coordinator) -> None:
        name = fault.kind.removeprefix("exit_at_")
        self._log(fault, coordinator, pid=os.getpid(), state=f"failpoint {name} armed")
        os.environ[VARIABLE] = f"{name}:exit:{min(fault.sightings, 2)}"

    def _fill_disk(self, fault: Fault, coordinator: Coordinator) -> None:
        directory = Path(coordinator.config.run.dir).parent
        self._log(fault, coordinator, pid=os.getpid(), state=f"{fill_disk(directory) >> 20} MiB filled")

    async def _signal_driver(self, fault: Fault, coordinator: Coordinator) -> None:
        await asyncio.sleep(fault.delay_s)
        while not (busy := coordinator.roles.clock.under_way):
            await asyncio.sleep(POLL_S)
        state = "waiting for " + ", ".join(sorted({f"{task.role} ({task.phase})" for task in busy}))
        self._log(fault, coordinator, pid=os.getpid(), state=state)
        os.kill(os.getpid(), fault.details.signal)

    def _order_reward_failure(self, fault: Fault, coordinator: Coordinator) -> None:
        """Order the reward service to fail at the next request."""
        self._log(fault, coordinator, in_state=True, state="a request for scores was received")
        order_failure(self._injections, fault.number, fault.kind.removeprefix("http_"))

    def _order_nan(self, fault: Fault, coordinator: Coordinator) -> None:
        """Order a loss or gradient of the next update to be NaN."""
        details = fault.details
        self._log(fault, coordinator, role=details.role, rank=fault.rank, in_state=True,
                  state=f"a {details.phase} of the next update")
        order_nan(self._injections, fault.number, details.role, fault.rank, details.phase)

    async def _inject_into_worker(self, fault: Fault, coordinator: Coordinator) -> None:
        details, clock = fault.details, coordinator.roles.clock
        (group,) = (group for group in coordinator.roles.groups() if group.role == details.role)
        task, process = await call_under_way(fault, coordinator, group, self._is_spared)
        in_state = task in clock.under_way and is_up(process)
        self._log(fault, coordinator, role=details.role, rank=fault.rank, pid=process.pid,
            incarnation=group.incarnation(fault.rank), in_state=in_state,
            state=f"{details.phase} under way for {clock.now() - task.since:.3f} s")
        await self._signal_or_take_node(fault, group, process)
        self._learners_lost |= details.target == "learner"
        self._in_thread(log_effect, self._injections, fault, process)

    def _in_thread(self, confirm: Callable[..., None], *arguments: Any) -> None:
        """Confirm the effect of a fault in a separate thread."""
        task = asyncio.create_task(asyncio.to_thread(confirm, *arguments))
        self._confirming.add(task)  # a task without a reference may be garbage-collected
        task.add_done_callback(self._confirming.discard)

    def _is_spared(self, fault: Fault) -> bool:
        """Whether the victim is about to be replaced anyway: when one learner is lost, all are."""
        return fault.details.target == "learner" and self._learners_lost

    async def _signal_or_take_node(self, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Send the signal, or kill or cut off the worker's node."""
        if fault.details.target == "node":
            processes, incarnation = group.processes(fault.rank), group.incarnation(fault.rank)
            assert processes is not None and self._nodes is not None, "a run on one node has no fault of nodes"
            if fault.details.comes_back:
                self._in_thread(resume_partitioned, self._injections, fault, self._nodes.cut_off(processes.node),
                                lambda: group.incarnation(fault.rank) > incarnation)
            else:
                await asyncio.to_thread(self._nodes.lose, processes.node)
            return
        with suppress(psutil.NoSuchProcess):
            process.send_signal(fault.details.signal)
