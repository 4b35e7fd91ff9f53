"""A Ray cluster of several nodes on this machine, of which some can be killed or cut off, with all their workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

AWAY = {"where": "away"}
"""Label of the nodes that may be lost; the driver runs on another node."""
SPARE = 2
"""Number of these nodes beyond one for each generator, so that a replacement has a node."""
STORE_BYTES = 100 * 2**20
HEARTBEAT_TIMEOUT_S = 5.0
"""`cluster.heartbeat_timeout_s` of the runs."""
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 1000,
          "health_check_failure_threshold": 8}
"""Ray considers a node dead that does not answer for about ten seconds: longer than the heartbeat timeout, and than a
raylet among busy processes ever takes."""


class Nodes:
    """The nodes that may be lost."""

    def __init__(self, cluster: Any, away: list[Any]) -> None:
        self._cluster, self._away = cluster, away

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return str(self._cluster.address)

    def lose(self, node_id: str) -> None:
        """Kill a node's own processes, which ends its workers.

        Raises:
            ValueError: it is not one of the nodes that may be lost.
        """
        self._cluster.remove_node(self._take(node_id), allow_graceful=False)

    def cut_off(self, node_id: str) -> list[psutil.Process]:
        """Stop a node's own processes and its workers; returns them.

        Raises:
            ValueError: it is not one of the nodes that may be lost.
        """
        raylet = psutil.Process(self._take(node_id).all_processes["raylet"][0].process.pid)
        raylet.suspend()  # first, so that it starts no more workers
        others = raylet.children(recursive=True)
        for process in others:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        return [raylet, *others]

    def _take(self, node_id: str) -> Any:
        (node,) = (node for node in self._away if node.node_id == node_id)
        self._away.remove(node)
        return node


def several_nodes_sections(generators: int) -> Mapping[str, Mapping[str, Any]]:
    """The configuration sections of a run on such a cluster: each generator fills a node."""
    return {"pools": {"default": {"cpus": 4}, "away": {
                "bundles": generators, "cpus": 1, "strategy": "STRICT_SPREAD", "labels": AWAY}},
            "generator": {"pool": "away", "cpus": 1}, "cluster": {"allow_open": True}}


@contextmanager
def several_nodes(pools: Mapping[str, Any]) -> Iterator[Nodes | None]:
    """The cluster that the pools of a configuration need; None where they do not need several nodes, and the run starts
    its own private Ray."""
    if "away" not in pools:
        yield None
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={
        "num_cpus": pools["default"]["cpus"], "object_store_memory": STORE_BYTES, "include_dashboard": False,
        "labels": {"where": "head"}, "_system_config": HEALTH})
    try:
        away = [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, labels=AWAY)
                for _ in range(pools["away"]["bundles"] + SPARE)]
        cluster.wait_for_nodes()
        yield Nodes(cluster, away)
    finally:
        cluster.shutdown()
