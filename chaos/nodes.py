"""A Ray cluster of several nodes on this machine, of which some can be killed or cut off, with all their workers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from chaos.networks import HEAD_ADDRESS, NodeNetwork, has_private_network
from chaos.relay import Relay

HEAD, AWAY = {"where": "head"}, {"where": "away"}
"""Labels of the driver's node and of the nodes that may be lost. The reward service can be reached from the former."""
SPARE = 2
SPARE_NODES = {"away": SPARE, "scarce": 0}
"""By the name of their pool, number of these nodes beyond one for each bundle, so that a replacement has a node."""
JOINED_S = 100.0
"""Within this time a node must have joined the cluster."""
STORE_BYTES = 100 * 2**20
NODE_PORT = 7000
"""Port of the node's own process, where each node has an address of its own."""
HEARTBEAT_TIMEOUT_S = 5.0
"""`cluster.heartbeat_timeout_s` of the runs."""
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 1000,
          "health_check_failure_threshold": 8}
"""Ray considers a node dead that does not answer for about ten seconds: longer than the heartbeat timeout, and than a
raylet among busy processes ever takes."""


class AwayNode:
    """A node that may be lost, among the others on the network of the driver."""

    def __init__(self, cluster: Any, cpus: int) -> None:
        self._cluster = cluster
        self._node = cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, labels=AWAY)
        self._stopped: list[psutil.Process] = []

    @property
    def node_id(self) -> str:
        """Ray's id."""
        return str(self._node.node_id)

    def lose(self) -> None:
        """Kill its own processes, which ends its workers."""
        self._cluster.remove_node(self._node, allow_graceful=False)

    def cut_off(self) -> list[psutil.Process]:
        """Stop its processes and workers; returns them."""
        raylet = self._raylet
        raylet.suspend()  # first, so that it starts no more workers
        self._stopped = [raylet, *raylet.children(recursive=True)]
        for process in self._stopped[1:]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        return self._stopped

    def is_cut_off(self) -> bool:
        """Whether all of them are stopped."""
        with suppress(psutil.NoSuchProcess):
            return all(process.status() == psutil.STATUS_STOPPED for process in self._stopped)
        return False

    def reconnect(self) -> None:
        """Undo `cut_off`."""
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def close(self) -> None:
        """It ends with the cluster."""

    @property
    def _raylet(self) -> psutil.Process:
        return psutil.Process(self._node.all_processes["raylet"][0].process.pid)


class DistantNode:
    """A node that may be lost, with an address and a network namespace of its own."""

    def __init__(self, gcs_address: str, cpus: int, number: int) -> None:
        self._network = NodeNetwork(number)
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={gcs_address}",
                   f"--node-ip-address={self._network.address}", f"--num-cpus={cpus}",
                   f"--node-manager-port={NODE_PORT}",
                   f"--object-store-memory={STORE_BYTES}", f"--labels={','.join(f'{k}={v}' for k, v in AWAY.items())}",
                   "--disable-usage-stats"]
        self._process = self._network.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    @property
    def node_id(self) -> str:
        """Ray's id; empty before the node has joined."""
        import ray

        return next((str(node["NodeID"]) for node in ray.nodes()
                     if node["Alive"] and node["NodeManagerAddress"] == self._network.address), "")

    def lose(self) -> None:
        """Kill its processes and workers."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def cut_off(self) -> list[psutil.Process]:
        """Discard its packets; returns its processes and workers."""
        processes = psutil.Process(self._process.pid).children(recursive=True)
        self._network.cut()
        return processes

    def is_cut_off(self) -> bool:
        """Whether its own process cannot be reached."""
        return not self._network.is_reachable(NODE_PORT)

    def reconnect(self) -> None:
        """Undo `cut_off`."""
        self._network.heal()

    def close(self) -> None:
        """End its processes."""
        self.lose()
        self._process.kill()
        self._process.wait()
        self._network.close()


Node = AwayNode | DistantNode


class Nodes:
    """The nodes that may be lost, and the link of the driver to the control store."""

    def __init__(self, away: Sequence[Node], link: Relay) -> None:
        self._away, self.link = list(away), link

    @property
    def address(self) -> str:
        """Address of the cluster, for the driver."""
        return self.link.address

    def take(self, node_id: str) -> Node:
        """A node that is about to be lost, or to be cut off.

        Raises:
            ValueError: it is not one of the nodes that may be lost.
        """
        (node,) = (node for node in self._away if node.node_id == node_id)
        self._away.remove(node)
        return node


def generator_node_sections(generators: int, pool: str = "away") -> Mapping[str, Mapping[str, Any]]:
    """The configuration sections of a run with a node for each generator, in the pool "away" or "scarce"."""
    return {"pools": {"default": {"cpus": 4, "labels": HEAD}, pool: {
                "bundles": generators, "cpus": 1, "strategy": "STRICT_SPREAD", "labels": AWAY}},
            "generator": {"pool": pool, "cpus": 1}, "cluster": {"allow_open": True}}


def runner_node_sections(runners: int) -> Mapping[str, Mapping[str, Any]]:
    """The configuration sections of a run with a node for each episode runner."""
    return {"pools": {"default": {"cpus": 4, "labels": HEAD}, "away": {
                "bundles": runners, "cpus": 1, "strategy": "STRICT_SPREAD", "labels": AWAY}},
            "episode_runner": {"pool": "away", "cpus": 1}, "cluster": {"allow_open": True}}


def learner_node_sections() -> Mapping[str, Mapping[str, Any]]:
    """The configuration sections of a run with all learners on one node."""
    return {"pools": {"default": {"cpus": 4, "labels": HEAD}, "away": {"bundles": 1, "cpus": 4, "labels": AWAY}},
            "policy": {"pool": "away"}, "critic": {"pool": "away"}, "cluster": {"allow_open": True}}


@contextmanager
def several_nodes(pools: Mapping[str, Any]) -> Iterator[Nodes | None]:
    """The cluster that the pools of a configuration need; None where they do not need several nodes, and the run starts
    its own private Ray. Nodes have addresses of their own on a private network."""
    name = next((name for name in SPARE_NODES if name in pools), None)
    if name is None:
        yield None
        return
    from ray.cluster_utils import Cluster

    distant = has_private_network()
    cluster = Cluster(initialize_head=True, head_node_args={
        "num_cpus": pools["default"]["cpus"], "object_store_memory": STORE_BYTES, "include_dashboard": False,
        "labels": HEAD, "_system_config": HEALTH,
        **({"node_ip_address": HEAD_ADDRESS} if distant else {})})
    away: list[Node] = []
    link = Relay(cluster.address)
    try:
        cpus = pools[name]["cpus"]
        for number in range(1, pools[name]["bundles"] + SPARE_NODES[name] + 1):
            node = DistantNode(cluster.address, cpus, number) if distant else AwayNode(cluster, cpus)
            away.append(node)
            _wait_for(cluster, 1 + len(away))  # together they are slower than Ray waits for each on a busy machine
        yield Nodes(away, link)
    finally:
        for node in away:
            node.close()
        link.close()
        cluster.shutdown()


def _wait_for(cluster: Any, number: int) -> None:
    """Wait until so many nodes have joined.

    Raises:
        TimeoutError: they have not within JOINED_S.
    """
    until = time.monotonic() + JOINED_S
    while (present := len(cluster.global_state._live_node_ids())) < number:
        if time.monotonic() > until:
            raise TimeoutError(f"{present} of {number} nodes have joined the cluster within {JOINED_S:g} s")
        time.sleep(0.1)
