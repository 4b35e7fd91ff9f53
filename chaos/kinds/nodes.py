"""Whole nodes that are lost or cut off, with the workers on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from chaos.evidence import Evidence
from chaos.faults import STOP, Fault
from chaos.kinds.workers import WorkerFault
from chaos.scene import Scene

if TYPE_CHECKING:
    import psutil

    from rlhf_ray.cluster.worker_group import WorkerGroup

GENERATOR: dict[str, Any] = {
    "victim": "node of a generator", "role": "generator", "phase": "generate", "state": "requests in flight",
    "most_delay_s": 0.1, "runs": {"several_nodes": 1}}


@dataclass(frozen=True, kw_only=True)
class NodeFault(WorkerFault):
    """The node of a worker in the middle of a call is killed, or stopped (`signal`) until the run has replaced the
    worker."""

    colour: ClassVar[str] = "node"

    async def hit(self, scene: Scene, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Kill or cut off the node."""
        import asyncio

        from chaos.victims import resume_partitioned

        processes, incarnation = group.processes(fault.rank), group.incarnation(fault.rank)
        assert processes is not None and scene.nodes is not None, "a run on one node has no fault of nodes"
        if self.signal == STOP:
            scene.in_thread(resume_partitioned, scene.injections, fault, scene.nodes.cut_off(processes.node),
                            lambda: group.incarnation(fault.rank) > incarnation)
        else:
            await asyncio.to_thread(scene.nodes.lose, processes.node)

    def problem_after(self, evidence: Evidence, fault: Fault) -> str:
        """A node that was cut off must have been away until its worker was replaced, and have ended afterwards."""
        if self.signal == STOP and not evidence.logged("recovered", fault):
            return "the node was not stopped until its worker was replaced, or did not end when it was back"
        return ""


KINDS = (
    NodeFault(name="node_lost", words="a node with a generator at work is lost", mechanism="killed", signal=0,
              **GENERATOR),
    NodeFault(name="partition", mechanism="cut off", signal=STOP,
              words="a node with a generator at work is cut off, and comes back after it was replaced", **GENERATOR),
)
"""Kinds of this module."""
