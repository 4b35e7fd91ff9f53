"""The nodes of a running cluster, as planning knows them."""

import time
from collections.abc import Mapping

import ray

from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.internals.ray import HEAD_RESOURCE, drain_deadlines, free_resources
from rlhf_ray.planning.hardware import gpu_of
from rlhf_ray.planning.node_spec import Node

ACCELERATOR_LABEL, ACCELERATOR_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"


def nodes_of_cluster(config: ClusterConfig) -> list[Node]:
    """Nodes of the cluster at `config.address`; the connection is closed afterwards.

    Raises:
        ClusterError: as `session.ray_session`.
    """
    with ray_session(config, {}, "plan"):
        return present_nodes()


def present_nodes() -> list[Node]:
    """Alive nodes of the cluster that this process is connected to, with their free resources (Ray's view is at most a
    second old). The head comes first."""
    free = free_resources()
    alive = [as_node(node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"], node["Resources"],
                     node.get("Labels"), free.get(node["NodeID"])) for node in ray.nodes() if node["Alive"]]
    return head_first(alive)


def head_first(nodes: list[Node]) -> list[Node]:
    """Sort the head first: planning assumes that the driver runs on the first node."""
    return sorted(nodes, key=lambda node: HEAD_RESOURCE not in node.resources)


def as_node(node_id: str, host: str, address: str, resources: Mapping[str, float], labels: Mapping[str, str] | None,
            free: Mapping[str, float] | None = None) -> Node:
    """Convert Ray's description of a node to planning's."""
    labels = labels or {}
    kinds = [key.removeprefix(ACCELERATOR_RESOURCE) for key in resources if key.startswith(ACCELERATOR_RESOURCE)]
    kind = labels.get(ACCELERATOR_LABEL) or next(iter(kinds), "")
    # Ray's "memory" does not include the memory of the object store.
    memory = float(resources.get("memory", 0)) + float(resources.get("object_store_memory", 0))
    return Node(f"{host} ({address}, {node_id[:8]})", resources, memory, gpu_of(kind) if kind else None, labels,
                free or {}, node_id)


def draining_nodes() -> dict[str, float | None]:
    """Nodes that are being drained (a spot machine's notice, an autoscaler's decision, `ray drain-node`): Ray's id, and
    the seconds left, None when no deadline is set."""
    return {node: deadline_ms / 1000 - time.time() if deadline_ms else None
            for node, deadline_ms in drain_deadlines().items()}


def own_node() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())
