"""A Ray cluster of several nodes on this machine: a head that holds only drivers, and workers with labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

STORE = 100 * 2**20
"""Bytes of each node's object store."""
METRICS = {"metrics_report_interval_ms": 500}
SMALL_RESULTS = {"max_direct_call_object_size": 4096}
"""Larger ones go from store to store, and not through the driver: docs/cluster.md."""


class Nodes:
    """Starts nodes and ends them. Ray calls each by an id; here they have names, which are their label `kind`."""

    def __init__(self, system: dict[str, Any]) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE, "labels": {"kind": "head"}}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": system} if system
                                else head)
        self._handles: dict[str, Any] = {"head": self._cluster.head_node}

    @property
    def address(self) -> str:
        """For `cluster.address`."""
        return str(self._cluster.address)

    def add(self, kind: str, cpus: int = 4, resources: dict[str, float] | None = None) -> None:
        """One node more, labelled with its kind."""
        self._handles[kind] = self._cluster.add_node(
            num_cpus=cpus, labels={"kind": kind}, resources=resources, object_store_memory=STORE)

    def remove(self, kind: str) -> None:
        """End a node and everything on it, without a word to anybody."""
        self._cluster.remove_node(self._handles.pop(kind), allow_graceful=False)

    def ids(self) -> dict[str, str]:
        """Kind -> Ray's id, of the nodes that are alive; for a connected driver."""
        import ray

        return {node["Labels"]["kind"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def received(self) -> dict[str, float]:
        """Kind -> bytes that its object manager has received from other nodes so far; half a second old at most where
        `METRICS` is set. For a connected driver."""
        import ray

        found = {}
        for node in ray.nodes():
            if node["Alive"]:
                url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
                with urlopen(url, timeout=10) as answer:
                    text = answer.read().decode()
                lines = [line for line in text.splitlines() if line.startswith("ray_object_manager_bytes{")]
                found[node["Labels"]["kind"]] = sum(float(line.rsplit(" ", 1)[1]) for line in lines
                                                    if 'Type="Received"' in line)
        return found

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextmanager
def cluster_of(*kinds: str, system: dict[str, Any] | None = None, **cpus: int) -> Iterator[Nodes]:
    """A cluster with one node of each kind beside its head.

    Args:
        system: Ray's own settings.
        cpus: of a kind's node, where it is not 4.
    """
    nodes = Nodes(system or {})
    try:
        for kind in kinds:
            nodes.add(kind, cpus.get(kind, 4))
        yield nodes
    finally:
        nodes.shutdown()
