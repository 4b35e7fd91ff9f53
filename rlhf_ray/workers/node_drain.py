"""Reaction of a run to node drains, such as the preemption of a spot machine.

If a learner or the driver is on a draining node, the run saves a checkpoint and ends, as after a request to stop. Other
workers are replaced when their node is gone.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from rlhf_ray.cluster.nodes import draining_nodes, own_node
from rlhf_ray.workers.worker_group import WorkerGroup

LOOK_S = 2.0
"""Between two checks. Clouds give notice of half a minute (Google's spot machines) to two minutes (Amazon's)."""


class DrainWatch:
    """Handles each draining node once."""

    def __init__(self, ask_to_stop: Callable[[str], None], warn: Callable[[str], None], learners: Sequence[WorkerGroup],
                 others: Sequence[WorkerGroup] = ()) -> None:
        """
        Args:
            ask_to_stop: called with the reason when the driver or a learner is on a draining node.
            warn: called with a warning for each draining node with a worker.
        """
        self._ask_to_stop = ask_to_stop
        self._warn = warn
        self._learners = learners
        self._others = others
        self._driver = own_node()
        self._reported: set[tuple[str, bool]] = set()
        """Nodes with a warning, and whether the run ends because of them. A learner may start on a draining node after
        the first warning, which then needs a second one."""

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            draining: Mapping[str, float | None] = {}
            with suppress(Exception):  # other code reports a control service that does not answer
                draining = await asyncio.to_thread(draining_nodes)
            for node, left_s in draining.items():
                self.handle(node, left_s)
            await asyncio.sleep(LOOK_S)

    def handle(self, node: str, left_s: float | None) -> None:
        """Handle a draining node, which is removed in `left_s` seconds (None: unknown)."""
        when = "" if left_s is None else f" in {max(0.0, left_s):.0f} s"
        bound = ["the driver"] * (node == self._driver) + workers_on(node, self._learners)
        workers = bound or workers_on(node, self._others)
        if not workers or (node, bool(bound)) in self._reported:
            return
        self._reported.add((node, bool(bound)))
        self._warn(f"the node of {', '.join(workers)} is being drained and goes away{when}" + (
            ": the run is saved and ends" if bound else "; they are then replaced on another node with free resources"))
        if bound:
            self._ask_to_stop("the drain of its node")


def workers_on(node: str, groups: Iterable[WorkerGroup]) -> list[str]:
    """Names of the workers with a known process on the node."""
    return [f"{group.role}/{rank}" for group in groups for rank in group.ranks
            if (processes := group.processes(rank)) is not None and processes.node == node]
