"""Whole nodes that are lost or cut off, with the workers on them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from chaos.driver_under_test import DriverUnderTest
from chaos.evidence import Evidence, Outcome
from chaos.faults import KILL, Fault
from chaos.kind import judged
from chaos.kinds.workers import LONG_CALL, LearnerFault, WorkerFault
from chaos.requirements import NETWORK_NAMESPACES

if TYPE_CHECKING:
    import psutil

    from rlhf_ray.workers.worker_group import WorkerGroup

GENERATOR: dict[str, Any] = {
    "victim": "node of a generator", "role": "generator", "phase": "generate", "state": "requests in flight",
    "most_delay_s": 0.1, "runs": {"generator_nodes": 1}}

NOT_REPLACED = "not replaced yet, the others of generator go on"


@dataclass(frozen=True, kw_only=True)
class NodeFault(WorkerFault):
    """The node of a worker in the middle of a call is killed, or cut off until the run has replaced the worker."""

    cut_off: bool = False
    signal: int = KILL

    colour: ClassVar[str] = "node"

    async def hit(self, driver: DriverUnderTest, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Kill or cut off the node."""
        from chaos.victims import cut_off_until_replaced

        processes, incarnation = group.processes(fault.rank), group.incarnation(fault.rank)
        assert processes is not None and driver.nodes is not None, "a run on one node has no fault of nodes"
        node = await asyncio.to_thread(driver.nodes.take, processes.node)
        if self.cut_off:
            driver.in_thread(cut_off_until_replaced, driver.injections, fault, node,
                            lambda: group.incarnation(fault.rank) > incarnation)
        else:
            await asyncio.to_thread(node.lose)

    def confirm(self, driver: DriverUnderTest, fault: Fault, process: psutil.Process) -> None:
        """A node that is cut off is confirmed to be so, instead of the process."""
        if not self.cut_off:
            super().confirm(driver, fault, process)

    def problem_after(self, evidence: Evidence, fault: Fault) -> str:
        """A node that was cut off must have been away until its worker was replaced, and have ended afterwards."""
        if self.cut_off and not evidence.logged("recovered", fault):
            return "the node was not cut off until its worker was replaced, or did not end when it was back"
        return ""


@dataclass(frozen=True, kw_only=True)
class LearnerNodeFault(NodeFault, LearnerFault):
    """The node of all learners."""

    colour: ClassVar[str] = "node"

    async def hit(self, driver: DriverUnderTest, fault: Fault, group: WorkerGroup, process: psutil.Process) -> None:
        """Kill or cut off the node."""
        driver.learners_lost = True
        await NodeFault.hit(self, driver, fault, group, process)


@dataclass(frozen=True, kw_only=True)
class NodeLostForGood(NodeFault):
    """A node is lost, and there is no other one for its worker."""

    is_repaired: ClassVar[bool] = False

    def outcome(self, evidence: Evidence, fault: Fault, injection: dict[str, Any]) -> Outcome:
        """The run must report that the worker is not replaced, and reach its end with the others."""
        event = next((event for event in evidence.events if self.is_mine(event, injection)), None)
        if event is None:
            return judged(evidence, fault, injection, "the run never noticed")
        evidence.events.remove(event)
        problem = "" if NOT_REPLACED in event["outcome"] else f"it ended as {event['outcome']!r}"
        return judged(evidence, fault, injection, problem, max(0.0, event["lost_at"] - injection["time"]))


KINDS = (
    NodeFault(name="node_lost", words="a node with a generator at work is lost", mechanism="killed", **GENERATOR),
    NodeLostForGood(name="node_lost_without_spare", mechanism="killed",
                    words="a node with a generator at work is lost, and there is no other one",
                    **{**GENERATOR, "state": "no spare node", "runs": {"scarce_nodes": 1}}),
    LearnerNodeFault(name="learner_node_lost", words="the node of the learners is lost in an update",
                     mechanism="killed", victim="node of the learners", role="policy_learner",
                     phase="policy_update", state="update", runs={"learner_node": 1}, **LONG_CALL),
    LearnerNodeFault(name="learner_partition", mechanism="cut off", cut_off=True, victim="node of the learners",
                     words="the node of the learners is cut off in an update, and comes back after it was replaced",
                     role="policy_learner", phase="policy_update", state="update", runs={"learner_node": 1},
                     requires=(NETWORK_NAMESPACES,), **LONG_CALL),
    NodeFault(name="partition", mechanism="cut off", cut_off=True,
              words="a node with a generator at work is cut off, and comes back after it was replaced", **GENERATOR),
)
"""Kinds of this module."""
