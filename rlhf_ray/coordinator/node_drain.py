"""A run that is told that a machine of its goes away leaves in good order while it can.

Learners, and the driver itself, cannot be without their node: everything is saved and the run ends, as when a person
asks it to. Other workers are replaced when they are gone.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from rlhf_ray.cluster.nodes import draining_nodes, own_node
from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.observability.background_task import OnFailure, background_task, log_failure

LOOK_S = 2.0
"""Between two looks. Clouds give notice of half a minute (Google's spot machines) to two (Amazon's)."""


@asynccontextmanager
async def watch_node_drains(
    stop: StopRequest, warn: Callable[[str], None], learners: Iterable[WorkerGroup],
    others: Iterable[WorkerGroup] = (), on_failure: OnFailure = log_failure,
) -> AsyncIterator[None]:
    """Look after nodes that are being drained during the enclosed work.

    Args:
        stop: is asked when one of them is the driver's or a learner's.
        warn: is told of those with other workers.
        on_failure: called where nodes cannot be asked for.
    """
    notices = Notices(stop, warn, tuple(learners), tuple(others))
    async with background_task("the watch for drained nodes", notices.keep_looking, on_failure):
        yield


class Notices:
    """What was said of each node, once."""

    def __init__(self, stop: StopRequest, warn: Callable[[str], None], learners: tuple[WorkerGroup, ...],
                 others: tuple[WorkerGroup, ...]) -> None:
        self._stop, self._warn, self._learners, self._others = stop, warn, learners, others
        self._driver = own_node()
        self._told: set[tuple[str, bool]] = set()
        """Nodes, and whether it was said that the run ends for them. One that is nobody's at first may become a
        learner's: they may be about to start there."""

    async def keep_looking(self) -> None:
        """Look until cancelled."""
        while True:
            found: Mapping[str, float | None] = {}
            with suppress(Exception):  # a control service that gives no answer is met elsewhere
                found = await asyncio.to_thread(draining_nodes)
            for node, left_s in found.items():
                self.heed(node, left_s)
            await asyncio.sleep(LOOK_S)

    def heed(self, node: str, left_s: float | None) -> None:
        """A node is being drained, and goes away in `left_s` seconds if that is known."""
        when = "" if left_s is None else f" in {max(0.0, left_s):.0f} s"
        bound = ["the driver"] * (node == self._driver) + workers_on(node, self._learners)
        workers = bound or workers_on(node, self._others)
        if not workers or (node, bool(bound)) in self._told:
            return
        self._told.add((node, bool(bound)))
        self._warn(f"the node of {', '.join(workers)} is being drained and goes away{when}" + (
            ": the run is saved and ends" if bound else "; they are replaced where there is room for them then"))
        if bound:
            self._stop.ask("the drain of its node")


def workers_on(node: str, groups: Iterable[WorkerGroup]) -> list[str]:
    """Names of the workers that have named a process of theirs on the node."""
    return [f"{group.role}/{rank}" for group in groups for rank in group.ranks
            if (processes := group.processes(rank)) is not None and processes.node == node]
