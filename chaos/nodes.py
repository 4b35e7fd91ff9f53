"""A cluster of several nodes on this machine, of which some can be lost, or cut off, with all that is on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

AWAY = {"where": "away"}
"""Label of the nodes that may be lost; the driver is on another."""
SPARE = 2
"""Nodes more than generators, so that there is where to go."""
STORE_BYTES = 100 * 2**20
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 1000,
          "health_check_failure_threshold": 8}
"""Ray takes a node for dead that does not answer for some ten seconds: longer than the lease, and than a raylet among
busy processes ever takes."""


class Nodes:
    """The nodes that may be lost."""

    def __init__(self, cluster: Any, away: list[Any]) -> None:
        self._cluster, self._away = cluster, away

    @property
    def address(self) -> str:
        """Of the cluster."""
        return str(self._cluster.address)

    def lose(self, node_id: str) -> None:
        """Kill a node's own processes, by which its workers end.

        Raises:
            ValueError: it is none of those that may be lost.
        """
        node = self._taken(node_id)
        self._cluster.remove_node(node, allow_graceful=False)

    def cut_off(self, node_id: str) -> list[psutil.Process]:
        """Stop a node's own processes and its workers; returns them.

        Raises:
            ValueError: it is none of those that may be lost.
        """
        raylet = psutil.Process(self._taken(node_id).all_processes["raylet"][0].process.pid)
        raylet.suspend()  # first, so that it starts nobody meanwhile
        others = raylet.children(recursive=True)
        for process in others:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        return [raylet, *others]

    def _taken(self, node_id: str) -> Any:
        (node,) = (node for node in self._away if node.node_id == node_id)
        self._away.remove(node)
        return node


def sections(generators: int) -> Mapping[str, Mapping[str, Any]]:
    """What the configuration of a run on such a cluster says otherwise: each generator fills a node of its own."""
    return {"pools": {"default": {"cpus": 4}, "away": {
                "bundles": generators, "cpus": 1, "strategy": "STRICT_SPREAD", "labels": AWAY}},
            "generator": {"pool": "away", "cpus": 1}, "cluster": {"allow_open": True}}


@contextmanager
def several_nodes(pools: Mapping[str, Any]) -> Iterator[Nodes | None]:
    """The cluster that the pools of a configuration ask for; None where that is Ray's private one, as usual."""
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
