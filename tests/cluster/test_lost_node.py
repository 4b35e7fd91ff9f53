"""Nodes that are taken away in the middle of a run, cut off for a while, or announced to go; and bytes that lay nowhere
else."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from chaos.nodes import HEALTH
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.cluster.processes import ELSEWHERE_S
from rlhf_ray.cluster.resource_pools import Pools
from rlhf_ray.config.load import load
from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.errors import RunInterrupted, WorkerLost
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.workers.worker_group import WorkerGroup
from tests.cluster.resumed import CLOCKS, TRAFFIC, samples, steps, without

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
AWAY = {"where": "away"}


@pytest.fixture
def nodes(own_ray):
    """A head node, two small ones, and what can be done to those."""
    cluster = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 4, "object_store_memory": 128 * 2**20, "include_dashboard": False, "labels": {"where": "head"},
        "_system_config": HEALTH})
    away = [cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, labels=AWAY) for _ in range(2)]
    cluster.wait_for_nodes()

    def raylet(node_id):
        (node,) = [node for node in away if node.node_id == node_id]
        return node, psutil.Process(node.all_processes["raylet"][0].process.pid)

    def announce(node_id):
        client = ray._raylet.GcsClient(address=cluster.address)
        accepted, why = client.drain_node(node_id, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "spot", 0)
        assert accepted, why

    try:
        yield SimpleNamespace(
            address=cluster.address, raylet=lambda node_id: raylet(node_id)[1], announce=announce,
            take_away=lambda node_id: cluster.remove_node(raylet(node_id)[0], allow_graceful=False))
    finally:
        ray.shutdown()
        cluster.shutdown()


def run_with(strike, configure, directory, nodes, heartbeat_timeout_s=30, **sections):
    """A run on the nodes, with `strike(coordinator)` beside its loop; where each worker of the role was."""
    from rlhf_ray.stages import ppo

    run = Coordinator.run

    async def run_and_strike(self):
        striking = asyncio.create_task(strike(self))
        try:
            await run(self)
        finally:
            striking.cancel()
            with suppress(asyncio.CancelledError):
                await striking

    pools = {"default": {"cpus": 3}, "away": {"cpus": 1, "labels": AWAY}}
    cluster = {"address": nodes.address, "allow_open": True, "heartbeat_timeout_s": heartbeat_timeout_s}
    config = load(PPOConfig, configure(directory, cluster=cluster, pools=pools, **sections), [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "run", run_and_strike)
        ppo.run(config)


async def busy(coordinator, step, phase):
    """Wait until somebody works on `phase` after `step` updates."""
    while coordinator.state.step != step or phase not in {task.phase for task in coordinator.roles.clock.under_way}:
        await asyncio.sleep(0.005)


GENERATOR_AWAY = {"generator": {"workers": 1, "pool": "away"}}


def assert_undisturbed(directory, finished):
    name = "model/model.safetensors"
    assert (directory / name).read_bytes() == (finished.directory / name).read_bytes()
    rows = [without(steps(d), *CLOCKS, TRAFFIC) for d in (directory, finished.directory)]
    assert rows[0] == rows[1] and samples(directory) == samples(finished.directory)


def test_a_generator_is_replaced_on_another_node_and_no_bit_changes(finished, configure, tmp_path, nodes):
    struck = []

    async def strike(coordinator):
        await busy(coordinator, 1, "generate")
        struck.append(coordinator.roles.generators.processes(0))
        await asyncio.to_thread(nodes.take_away, struck[0].node)

    run_with(strike, configure, tmp_path / "run", nodes, **GENERATOR_AWAY)
    (processes,) = struck
    assert not psutil.pid_exists(processes.pid)
    (event,) = read_faults(tmp_path / "run/faults.jsonl")
    assert (event["role"], event["pid"], event["recovery_s"] > 0) == ("generator", processes.pid, True)
    assert_undisturbed(tmp_path / "run", finished)


@pytest.mark.parametrize("heartbeat_timeout_s, kind", [(60, "died"), (5, "hung")])
def test_what_a_node_says_that_was_cut_off_counts_no_more_when_it_is_back(
        finished, configure, tmp_path, nodes, heartbeat_timeout_s, kind):
    """Its processes are stopped in the middle of a chunk, and go on when another generator has their place. They are
    given up when Ray takes the node for dead, or before, by the lease: then nobody waits for that node to kill them
    once it is dead."""
    cut_off, seen, seconds = [], [], []

    async def strike(coordinator):
        group = coordinator.roles.generators
        await busy(coordinator, 1, "generate")
        old = group.processes(0)
        cut_off.extend([nodes.raylet(old.node), *(psutil.Process(pid) for pid, _ in old.members)])
        for process in cut_off:
            process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            while group.incarnation(0) == 1:
                await asyncio.sleep(0.05)
            seconds.append(time.monotonic() - began)
            seen.extend(process.status() for process in cut_off)
        finally:
            for process in cut_off:
                os.kill(process.pid, signal.SIGCONT)

    run_with(strike, configure, tmp_path / "run", nodes, heartbeat_timeout_s, **GENERATOR_AWAY)
    assert seconds[0] < ELSEWHERE_S
    assert seen == [psutil.STATUS_STOPPED] * len(cut_off) and len(cut_off) >= 2
    _, alive = psutil.wait_procs(cut_off, timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == [], "they hear that they died"
    (event,) = read_faults(tmp_path / "run/faults.jsonl")
    assert (event["role"], event["incarnation"], event["kind"]) == ("generator", 1, kind) and event["recovery_s"] > 0
    assert_undisturbed(tmp_path / "run", finished)


def test_a_run_whose_learners_node_is_drained_is_saved_and_ends(configure, tmp_path, nodes):
    async def strike(coordinator):
        await busy(coordinator, 1, "generate")
        nodes.announce(coordinator.roles.policy.processes(0).node)

    one = {"generator": {"workers": 1},
           "critic": {"workers": 1, "zero_stage": 1}, "policy": {"workers": 1, "pool": "away"}}
    with pytest.raises(RunInterrupted, match="stopped by the drain of its node after step") as ended:
        run_with(strike, configure, tmp_path / "run", nodes, run={"steps": 1000}, checkpoint={"every": 0}, **one)
    assert ended.value.exit_code == 75
    step = CheckpointStore(tmp_path / "run/checkpoints", keep=2).latest().step
    assert step >= 1 and f"after step {step} of 1000" in str(ended.value)


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
        made = there.call(0, Holder.make)
        await made.done()
        await asyncio.to_thread(nodes.take_away, there.processes(0).node)
        with pytest.raises(WorkerLost) as caught:
            await here.call(0, Holder.take, made.ref).done()
        here.kill()
        return caught.value

    error = asyncio.run(lose())
    assert (error.kind, error.worker, error.method) == ("result", "here/0", "take")
    assert "was lost" in str(error)
