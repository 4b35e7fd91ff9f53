"""The nodes of the cluster that this process is connected to, as Ray tells of them."""

import ray
from ray._private import state

from rlhf_ray.planning.feasible import Node


def present_nodes() -> list[Node]:
    """Those that are alive, with what is free of each at this moment (Ray's view is a second old at most)."""
    free = state.available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Node(f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})", node["Resources"], node.get("Labels") or {},
                 free.get(node["NodeID"], {}), node["NodeID"]) for node in alive]

