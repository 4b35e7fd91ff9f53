"""Injects faults from inside the driver, the only process that knows which worker executes which call, and its pid.

Faults are injected one after the other, each as soon as it is due and its victim in the state that its kind requires.
The next fault does not wait until the victim of the last one has been replaced. A fault that is planned `during_repair`
is injected as soon as that replacement has begun.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from chaos.checkpoint_damage import valid_checkpoints
from chaos.driver_under_test import LEARNER_RESTART, POLL_S, RESUME, DriverUnderTest
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.kinds import kind_of
from chaos.nodes import Nodes
from rlhf_ray.checkpoint.store import Checkpoint
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.stages import ppo, ppo_attempts

CHECKPOINT_POLL_S = 0.1


class Injector:
    """The faults of one driver process."""

    def __init__(self, faults: Sequence[Fault], injections: InjectionLog, nodes: Nodes | None = None) -> None:
        """`nodes`: the nodes that may be lost, if the run has several."""
        mine = [fault for fault in faults if not kind_of(fault).follows_an_end]
        self.driver = DriverUnderTest(mine, injections, nodes)
        self._planned = bool(self.driver.left)

    def install(self) -> None:
        """Inject the remaining faults into every training loop of this process, and between two of them."""
        run, step = Coordinator.run, Coordinator._step_or_stop
        restart_learners, restore_checkpoint = ppo.restart_learners, ppo_attempts.restore_checkpoint

        async def restart(*arguments: Any) -> None:
            async with self.at(LEARNER_RESTART):
                await restart_learners(*arguments)

        async def restore(coordinator: Coordinator, start: Checkpoint | None, again: bool) -> None:
            self.driver.coordinator = coordinator
            async with self.at(RESUME if start is not None and not again else ""):
                await restore_checkpoint(coordinator, start, again)

        async def step_after_faults(coordinator: Coordinator) -> None:
            while self.must_wait(coordinator):
                await asyncio.sleep(POLL_S)
            await step(coordinator)

        async def run_with_faults(coordinator: Coordinator) -> None:
            self.driver.coordinator = coordinator
            self.driver.injections.add("loop", pid=os.getpid())
            injecting = asyncio.create_task(self._inject(), name="chaos")
            try:
                await run(coordinator)
            finally:
                injecting.cancel()
                with suppress(asyncio.CancelledError):
                    await injecting

        Coordinator.run = run_with_faults  # type: ignore[method-assign, assignment]
        Coordinator._step_or_stop = step_after_faults  # type: ignore[method-assign, assignment]
        ppo.restart_learners = restart  # type: ignore[assignment]
        ppo_attempts.restore_checkpoint = restore

    @asynccontextmanager
    async def at(self, moment: str) -> AsyncIterator[None]:
        """Inject the next fault during the block, if this is its moment; the block does not end before."""
        driver = self.driver
        fault = driver.left[0] if moment and driver.left and kind_of(driver.left[0]).moment == moment else None
        if fault is None:
            yield
            return
        driver.moment = moment
        injecting = asyncio.create_task(kind_of(fault).inject(driver, fault), name=f"chaos {moment}")
        try:
            yield
            await injecting
        finally:
            driver.moment = ""
            injecting.cancel()
            with suppress(asyncio.CancelledError):
                await injecting

    def must_wait(self, coordinator: Coordinator) -> bool:
        """Whether a fault holds training, or the next fault is due and its victim still down from an earlier one, or no
        fault is left and a worker is down or cut off. Otherwise training would continue without them, and might end
        before they are back."""
        if not self._planned:
            return False
        if self.driver.held:
            return True
        if self.driver.learners_lost:
            return False  # the next update finds it out; until then no generator can catch up
        down = {worker for worker, loss in coordinator.roles.health.down.items() if not loss.recorded}
        if not self.driver.left:
            return bool(down or self.driver.confirming)
        fault = self.driver.left[0]
        kind = kind_of(fault)
        if coordinator.state.step < fault.step:
            return False
        return bool(down) if kind.preceded_by else (kind.role, fault.rank) in down  # inside the repair of another one

    async def _inject(self) -> None:
        while self.driver.left and not kind_of(self.driver.left[0]).moment:
            fault = self.driver.left[0]
            while not self.is_due(fault):
                await asyncio.sleep(POLL_S)
            await self._wait_for_checkpoints(fault)
            await kind_of(fault).inject(self.driver, fault)

    def is_due(self, fault: Fault) -> bool:
        """Whether training has come so far; a fault during a repair waits for it, but not longer than an update. One
        that lasts does not begin in a loop that a lost learner is about to end, which would cut it short."""
        step = self.driver.coordinator.state.step
        if kind_of(fault).updates and self.driver.learners_lost:
            return False
        if fault.during_repair and step <= fault.step + 1:
            return bool(self.driver.repairing())
        return step >= fault.step

    async def _wait_for_checkpoints(self, fault: Fault) -> None:
        """Wait for the valid checkpoints that the fault needs; the newest may have been damaged before."""
        root = self.driver.coordinator.recovery.store.root
        while fault.valid_checkpoints and len(await asyncio.to_thread(valid_checkpoints, root)) < \
                fault.valid_checkpoints:
            await asyncio.sleep(CHECKPOINT_POLL_S)
