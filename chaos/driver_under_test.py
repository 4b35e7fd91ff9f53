"""The driver as a kind of fault finds it when it injects a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.nodes import Nodes

if TYPE_CHECKING:
    import psutil

    from rlhf_ray.coordinator.loop import Coordinator
    from rlhf_ray.workers.worker_group import WorkerGroup

LEARNER_RESTART, RESUME = "while learners are restarted", "while a run is resumed"
"""Moments outside the training loop."""
POLL_S = 0.002
"""Interval of polling for calls and processes."""
UPDATES_MEANWHILE = 3
"""So many updates are made during a fault that lasts (`DriverUnderTest.hold_until`)."""


class DriverUnderTest:
    """The driver's process: its coordinator, and the faults that are still to be injected into it."""

    def __init__(self, faults: Sequence[Fault], injections: InjectionLog, nodes: Nodes | None = None) -> None:
        """`nodes`: the nodes that may be lost, if the run has several."""
        self.left = list(faults)
        """Faults that are not injected yet, in their order."""
        self.injections, self.nodes = injections, nodes
        self.learners_lost = False
        """Whether a fault hit a learner in this loop: a new loop begins when all learners are restarted."""
        self.held = False
        """Whether training waits for a fault."""
        self.confirming: set[asyncio.Task[None]] = set()
        self.moment = ""
        """Outside the training loop: LEARNER_RESTART, RESUME, or neither."""
        self._coordinator: Coordinator | None = None
        self.victims: list[tuple[WorkerGroup, int, int, psutil.Process]] = []
        """Group, rank and incarnation of each worker that was hit, and the process that was."""

    @property
    def coordinator(self) -> Coordinator:
        """Of the present training loop."""
        assert self._coordinator is not None, "no training loop has begun"
        return self._coordinator

    @coordinator.setter
    def coordinator(self, coordinator: Coordinator) -> None:
        if coordinator is not self._coordinator:
            self._coordinator, self.learners_lost = coordinator, False

    def injected(self, fault: Fault, **fields: Any) -> None:
        """Log that a fault is injected, immediately before it acts. It is not injected again, even if this task is
        cancelled now."""
        self.left.remove(fault)
        self.injections.add("injected", fault=fault.number, kind=fault.kind, step=self.coordinator.state.step,
                            repairing=self.repairing(), **fields)

    def repairing(self) -> list[str]:
        """The workers that are being replaced now."""
        roles = self.coordinator.roles
        found = [f"{role}/{rank}" for (role, rank), loss in roles.health.down.items() if not loss.recorded]
        if self.moment == LEARNER_RESTART:
            found += [f"{group.role}/{rank}" for group in roles.learners() for rank in group.ranks]
        return sorted(found)

    def hit(self, group: WorkerGroup, rank: int, process: psutil.Process) -> None:
        """A fault hits a process of this worker now."""
        self.victims.append((group, rank, group.incarnation(rank), process))

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let training wait within the block, before the next update."""
        self.held = True
        try:
            yield
        finally:
            self.held = False

    async def hold_until(self, over: Awaitable[Any]) -> None:
        """Wait for something slow that a fault caused. Training waits for it too after UPDATES_MEANWHILE updates, and
        before the last one, so that later faults come at their updates."""
        future, coordinator = asyncio.ensure_future(over), self.coordinator
        last = min(coordinator.state.step + UPDATES_MEANWHILE, coordinator.config.run.steps - 1)
        while not future.done() and coordinator.state.step < last:
            await asyncio.sleep(POLL_S)
        with self.holding():
            await asyncio.shield(future)

    def in_thread(self, confirm: Callable[..., None], *arguments: Any) -> asyncio.Task[None]:
        """Confirm the effect of a fault in a separate thread. The run does not end before."""
        task = asyncio.create_task(asyncio.to_thread(confirm, *arguments))
        self.confirming.add(task)  # a task without a reference may be garbage-collected
        task.add_done_callback(self.confirming.discard)
        return task
