"""The nodes of a running cluster, as planning knows them."""

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.planning.hardware import gpu_of
from rlhf_ray.planning.nodes import Node

ACCELERATOR_LABEL, ACCELERATOR_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"
KNOWN = {"CPU", "GPU", "memory", "object_store_memory"}


def nodes_of_cluster(config: ClusterConfig) -> list[Node]:
    """What is alive of the cluster at `config.address`; the connection is closed again.

    Raises:
        ClusterError: as `session.ray_session`.
    """
    import ray

    from rlhf_ray.cluster.session import ray_session

    with ray_session(config, {}, "plan"):
        return [as_node(node) for node in alive(ray.nodes())]


def alive(nodes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of Ray's answer that work, the head first: the driver is thought of as lying there."""
    here = [node for node in nodes if node["Alive"]]
    return sorted(here, key=lambda node: "node:__internal_head__" not in node["Resources"])


def as_node(node: Mapping[str, Any]) -> Node:
    """One of `ray.nodes()`."""
    resources, labels = dict(node["Resources"]), dict(node.get("Labels") or {})
    kinds = [key.removeprefix(ACCELERATOR_RESOURCE) for key in resources if key.startswith(ACCELERATOR_RESOURCE)]
    kind = labels.get(ACCELERATOR_LABEL) or next(iter(kinds), "")
    custom = {key: float(amount) for key, amount in resources.items()
              if key not in KNOWN and not key.startswith(("node:", ACCELERATOR_RESOURCE))}
    # Ray sets the object store's memory apart from what it calls memory.
    memory = float(resources.get("memory", 0)) + float(resources.get("object_store_memory", 0))
    return Node(str(node["NodeManagerHostname"]) + f" ({node['NodeManagerAddress']}:{node['NodeManagerPort']})",
                float(resources.get("CPU", 0)), memory, int(resources.get("GPU", 0)), gpu_of(kind) if kind else None,
                labels, custom)
