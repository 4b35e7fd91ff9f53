"""Nodes that are about to be taken away: a spot machine's notice, an autoscaler's decision, `ray drain-node`."""

import time

import ray
from ray._private.state import state


def draining_nodes() -> dict[str, float | None]:
    """Ray's id of every node that is being drained, and how many seconds it has left (None: nobody said)."""
    found = state.get_draining_nodes()
    return {node: deadline_ms / 1000 - time.time() if deadline_ms else None for node, deadline_ms in found.items()}


def own_node() -> str:
    """Ray's id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())
