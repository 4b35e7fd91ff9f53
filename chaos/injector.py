"""Injects faults from inside the driver, the only process that knows which worker executes which call, and its pid.

Faults are injected one after the other, each as soon as it is due and its victim in the state that its kind requires.
The next fault does not wait until the victim of the last one has been replaced. A fault that is planned `during_repair`
is injected as soon as that replacement has begun.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

from chaos.checkpoint_damage import valid_checkpoints
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.kinds import kind_of
from chaos.nodes import Nodes
from chaos.scene import POLL_S, Scene
from rlhf_ray.coordinator.loop import Coordinator

CHECKPOINT_POLL_S = 0.1


class Injector:
    """The faults of one driver process."""

    def __init__(self, faults: Sequence[Fault], injections: InjectionLog, nodes: Nodes | None = None) -> None:
        """`nodes`: the nodes that may be lost, if the run has several."""
        self.scene = Scene([fault for fault in faults if not kind_of(fault).follows_an_end], injections, nodes)
        self._planned = bool(self.scene.left)

    def install(self) -> None:
        """Inject the remaining faults into every training loop of this process."""
        run, step = Coordinator.run, Coordinator._step_or_stop

        async def step_after_faults(coordinator: Coordinator) -> None:
            while self.must_wait(coordinator):
                await asyncio.sleep(POLL_S)
            await step(coordinator)

        async def run_with_faults(coordinator: Coordinator) -> None:
            self.scene.coordinator = coordinator
            self.scene.injections.add("loop", pid=os.getpid())
            injecting = asyncio.create_task(self._inject(), name="chaos")
            try:
                await run(coordinator)
            finally:
                injecting.cancel()
                with suppress(asyncio.CancelledError):
                    await injecting

        Coordinator.run = run_with_faults  # type: ignore[method-assign, assignment]
        Coordinator._step_or_stop = step_after_faults  # type: ignore[method-assign, assignment]

    def must_wait(self, coordinator: Coordinator) -> bool:
        """Whether a fault holds training, or the next fault is due and its victim still down from an earlier one, or no
        fault is left and a worker is down or cut off. Otherwise training would continue without them, and might end
        before they are back."""
        if not self._planned:
            return False
        if self.scene.held:
            return True
        down = {worker for worker, loss in coordinator.roles.health.down.items() if not loss.recorded}
        if not self.scene.left:
            return bool(down or self.scene.confirming)
        fault = self.scene.left[0]
        return coordinator.state.step >= fault.step and (kind_of(fault).role, fault.rank) in down

    async def _inject(self) -> None:
        while self.scene.left:
            fault = self.scene.left[0]
            while not self.is_due(fault):
                await asyncio.sleep(POLL_S)
            await self._wait_for_checkpoints(fault)
            await kind_of(fault).inject(self.scene, fault)

    def is_due(self, fault: Fault) -> bool:
        """Whether training has come so far; a fault during a repair waits for it, but not longer than an update."""
        step = self.scene.coordinator.state.step
        if fault.during_repair and step <= fault.step + 1:
            return bool(self.scene.repairing())
        return step >= fault.step

    async def _wait_for_checkpoints(self, fault: Fault) -> None:
        """Wait for the valid checkpoints that the fault needs; the newest may have been damaged before."""
        root = self.scene.coordinator.recovery.store.root
        while fault.valid_checkpoints and len(await asyncio.to_thread(valid_checkpoints, root)) < \
                fault.valid_checkpoints:
            await asyncio.sleep(CHECKPOINT_POLL_S)
