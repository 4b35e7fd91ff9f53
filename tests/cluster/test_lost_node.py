"""A node that is taken away in the middle of a run, with the generator on it; and bytes that lay nowhere else."""

import asyncio
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.cluster.pools import Pools
from rlhf_ray.config.load import load
from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.errors import WorkerLost
from rlhf_ray.observability.faults import read_faults
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
AWAY = {"where": "away"}


@pytest.fixture
def nodes():
    """A head node, two small ones, and how to take one away."""
    cluster = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 4, "object_store_memory": 128 * 2**20, "include_dashboard": False, "labels": {"where": "head"}})
    away = [cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, labels=AWAY) for _ in range(2)]
    cluster.wait_for_nodes()

    def take_away(node_id):
        (node,) = [node for node in away if node.node_id == node_id]
        cluster.remove_node(node, allow_graceful=False)

    try:
        yield SimpleNamespace(address=cluster.address, take_away=take_away)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_generator_is_replaced_on_another_node_and_no_bit_changes(configure, tmp_path, finished, nodes):
    from rlhf_ray.stages import ppo

    struck = []
    run = Coordinator.run

    async def strike(coordinator):
        group = coordinator.team.generators
        while not struck:
            busy = any(task.phase == "generate" for task in coordinator.team.clock.under_way)
            if coordinator.state.step == 1 and busy:
                struck.append(group.processes(0))
                await asyncio.to_thread(nodes.take_away, struck[0].node)
            await asyncio.sleep(0.005)

    async def run_and_strike(self):
        striking = asyncio.create_task(strike(self))
        try:
            await run(self)
        finally:
            striking.cancel()

    config = load(PPOConfig, configure(
        tmp_path / "run", cluster={"address": nodes.address, "allow_open": True, "lease_s": 30},
        pools={"default": {"cpus": 3}, "away": {"cpus": 1, "labels": AWAY}},
        generator={"workers": 1, "pool": "away"}), [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "run", run_and_strike)
        ppo.run(config)
    (processes,) = struck
    assert not psutil.pid_exists(processes.pid)
    (event,) = read_faults(tmp_path / "run/faults.jsonl")
    assert (event["role"], event["pid"], event["recovery_s"] > 0) == ("generator", processes.pid, True)
    name = "model/model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (finished.directory / name).read_bytes()
    rows = [without(steps(d), *CLOCKS, TRAFFIC) for d in (tmp_path / "run", finished.directory)]
    assert rows[0] == rows[1] and samples(tmp_path / "run") == samples(finished.directory)


class Holder:
    """Makes and takes bytes that are too many to travel by themselves."""

    def start(self):
        return None

    def make(self):
        return np.ones(1_000_000)

    def take(self, array):
        return float(array.sum())


def test_bytes_of_a_lost_node_are_no_fault_of_the_worker_that_was_to_read_them(nodes):
    ray.init(address=nodes.address, namespace="lost-bytes", log_to_driver=False)
    pools = Pools({"default": PoolConfig(cpus=1), "away": PoolConfig(cpus=1, labels=AWAY)})

    async def lose():
        await pools.open(60)
        there, here = (WorkerGroup(name, Holder, PlacementConfig(pool=pool, cpus=0.5), pools, lambda _: {}, {}, 60.0)
                       for name, pool in (("there", "away"), ("here", "default")))
        await there.start()
        await here.start()
        made = there.call(0, "make")
        await made.done()
        await asyncio.to_thread(nodes.take_away, there.processes(0).node)
        with pytest.raises(WorkerLost) as caught:
            await here.call(0, "take", made.ref).done()
        here.kill()
        return caught.value

    error = asyncio.run(lose())
    assert (error.kind, error.worker, error.method) == ("result", "here/0", "take")
    assert "was lost" in str(error)
