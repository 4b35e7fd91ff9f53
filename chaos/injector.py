"""Injects faults from inside the driver, which alone knows who is at work on what, and under which pid.

Faults are met one after the other, each as soon as it is due and its victim in the state that it asks for. What was
struck need not be back before the next one is due.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from chaos.damage import whole_checkpoints
from chaos.nodes import Nodes
from chaos.partition import come_back
from chaos.plan import Fault
from chaos.poison import order_poison, poison_file
from chaos.service import give_order, order_file
from chaos.small_disk import fill
from chaos.strikes import Strikes
from chaos.victims import LOOK_S, at_work, is_up, note_effect
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.failpoints import VARIABLE

SAVED_S = 0.1
"""Between two looks at checkpoints."""


class Injector:
    """The faults of one driver process."""

    def __init__(self, faults: Sequence[Fault], strikes: Strikes, nodes: Nodes | None = None) -> None:
        """`nodes`: those that may be lost, where the run is on several."""
        self._left = [fault for fault in faults if fault.what.target != "network"]  # that is Ray's to inject
        self._planned, self._strikes, self._nodes = bool(self._left), strikes, nodes
        self._confirming: set[asyncio.Task[None]] = set()
        self._learners_lost = False
        """Whether a learner was struck in this loop: another one begins when all were built again."""

    def install(self) -> None:
        """Let every loop of this process meet the faults that are left."""
        run, step = Coordinator.run, Coordinator._step_or_stop

        async def step_not_ahead_of_faults(coordinator: Coordinator) -> None:
            while self._must_wait(coordinator):
                await asyncio.sleep(LOOK_S)
            await step(coordinator)

        async def run_among_faults(coordinator: Coordinator) -> None:
            self._learners_lost = False
            self._strikes.add("loop", pid=os.getpid(), step=coordinator.state.step)
            injecting = asyncio.create_task(self._inject(coordinator), name="chaos")
            try:
                await run(coordinator)
            finally:
                injecting.cancel()
                with suppress(asyncio.CancelledError):
                    await injecting

        Coordinator.run = run_among_faults  # type: ignore[method-assign, assignment]
        Coordinator._step_or_stop = step_not_ahead_of_faults  # type: ignore[method-assign, assignment]

    def _must_wait(self, coordinator: Coordinator) -> bool:
        """Whether the next fault is due and its victim still down from an earlier one, or none is left and somebody is
        down, or cut off. Training would go on without them, and perhaps end before they are back."""
        if not self._planned:
            return False
        down = {worker for worker, loss in coordinator.roles.healing.down.items() if not loss.told}
        if not self._left:
            return bool(down or self._confirming)
        fault = self._left[0]
        return coordinator.state.step >= fault.step and (fault.what.role, fault.rank) in down

    async def _inject(self, coordinator: Coordinator) -> None:
        while self._left:
            fault = self._left[0]
            while coordinator.state.step < fault.step:
                await asyncio.sleep(LOOK_S)
            await self._enough_to_go_on_from(fault, coordinator)
            if fault.what.target == "failpoint":
                self._arm(fault, coordinator)
            elif fault.what.target == "disk":
                self._fill_disk(fault, coordinator)
            elif fault.what.target == "service":
                self._order_failure(fault, coordinator)
            elif fault.what.target == "numbers":
                self._poison(fault, coordinator)
            elif fault.what.target == "driver":
                await self._strike_driver(fault, coordinator)
            else:
                await self._strike_worker(fault, coordinator)
            self._left.pop(0)  # at once: a learner that is lost ends this task, and another goes on with what is left
            while order_file(self._strikes).exists() or poison_file(self._strikes).exists():
                await asyncio.sleep(LOOK_S)

    async def _enough_to_go_on_from(self, fault: Fault, coordinator: Coordinator) -> None:
        """Wait for the checkpoints that the fault asks for; the newest may have been damaged a while ago."""
        place = coordinator.recovery.store.root
        while fault.whole_checkpoints and len(await asyncio.to_thread(whole_checkpoints, place)) < \
                fault.whole_checkpoints:
            await asyncio.sleep(SAVED_S)

    def _arm(self, fault: Fault, coordinator: Coordinator) -> None:
        name = fault.kind.removeprefix("exit_at_")
        self._strikes.add("struck", fault=fault.number, kind=fault.kind, pid=os.getpid(), step=coordinator.state.step,
                          state=f"failpoint {name} armed")
        os.environ[VARIABLE] = f"{name}:exit:{min(fault.sightings, 2)}"

    def _fill_disk(self, fault: Fault, coordinator: Coordinator) -> None:
        place = Path(coordinator.config.run.dir).parent
        self._strikes.add("struck", fault=fault.number, kind=fault.kind, pid=os.getpid(), step=coordinator.state.step,
                          state=f"{fill(place) >> 20} MiB filled")

    async def _strike_driver(self, fault: Fault, coordinator: Coordinator) -> None:
        await asyncio.sleep(fault.delay_s)
        while not (busy := coordinator.roles.clock.under_way):
            await asyncio.sleep(LOOK_S)
        state = "waiting for " + ", ".join(sorted({f"{task.role} ({task.phase})" for task in busy}))
        self._strikes.add("struck", fault=fault.number, kind=fault.kind, pid=os.getpid(), step=coordinator.state.step,
                          state=state)
        os.kill(os.getpid(), fault.what.signal)

    def _order_failure(self, fault: Fault, coordinator: Coordinator) -> None:
        """Have the next request for scores fail."""
        self._strikes.add("struck", fault=fault.number, kind=fault.kind, step=coordinator.state.step, in_state=True,
                          state="a request for scores came in")
        give_order(self._strikes, fault.number, fault.kind.removeprefix("http_"))

    def _poison(self, fault: Fault, coordinator: Coordinator) -> None:
        """Have a number of the next update be none."""
        what = fault.what
        self._strikes.add("struck", fault=fault.number, kind=fault.kind, role=what.role, rank=fault.rank, in_state=True,
                          step=coordinator.state.step, state=f"a {what.phase} of the next update")
        order_poison(self._strikes, fault.number, what.role, fault.rank, what.phase)

    async def _strike_worker(self, fault: Fault, coordinator: Coordinator) -> None:
        what, clock = fault.what, coordinator.roles.clock
        (group,) = (group for group in coordinator.roles.groups() if group.role == what.role)
        task, process = await at_work(fault, coordinator, group, self._is_spared)
        in_state = task in clock.under_way and is_up(process)
        self._strikes.add(
            "struck", fault=fault.number, kind=fault.kind, role=what.role, rank=fault.rank, pid=process.pid,
            incarnation=group.incarnation(fault.rank), step=coordinator.state.step, in_state=in_state,
            state=f"{what.phase} under way for {clock.now() - task.since:.3f} s")
        await self._strike(fault, group, process)
        self._learners_lost |= what.target == "learner"
        self._meanwhile(note_effect, self._strikes, fault, process)

    def _meanwhile(self, see: Callable[..., None], *arguments: Any) -> None:
        """See to what a strike does, in a thread of its own."""
        seeing = asyncio.create_task(asyncio.to_thread(see, *arguments))
        self._confirming.add(seeing)  # a task that nobody holds may be collected
        seeing.add_done_callback(self._confirming.discard)

    def _is_spared(self, fault: Fault) -> bool:
        """Whether its victim is about to be ended anyway: with a learner all of them are."""
        return fault.what.target == "learner" and self._learners_lost

    async def _strike(self, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Send the signal, or take the node away, for a while or for good."""
        if fault.what.target == "node":
            processes, incarnation = group.processes(fault.rank), group.incarnation(fault.rank)
            assert processes is not None and self._nodes is not None, "a node is lost only where there are several"
            if fault.what.comes_back:
                self._meanwhile(come_back, self._strikes, fault, self._nodes.cut_off(processes.node),
                                lambda: group.incarnation(fault.rank) > incarnation)
            else:
                await asyncio.to_thread(self._nodes.lose, processes.node)
            return
        with suppress(psutil.NoSuchProcess):
            process.send_signal(fault.what.signal)
