"""Machines written down, and pools laid over them."""

import re

import pytest

from rlhf_ray.config.run import PlacementConfig, PoolConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.planning.hardware import (
    A100,
    A100_40,
    B200,
    B300,
    H100,
    H100_NVL,
    H100_PCIE,
    H200,
    L40S,
    RTX4090,
    RTX5090,
    gpu_of,
)
from rlhf_ray.planning.node_spec import GIB, Node, parse_nodes
from rlhf_ray.planning.worker_placement import place


class TestSpec:
    """What a person may write."""

    def test_nodes_by_their_gpus(self):
        nodes = parse_nodes("2x8xH100")
        assert [(n.name, n.gpus, n.gpu, n.cpus) for n in nodes] == [("node-0", 8, H100, 96), ("node-1", 8, H100, 96)]
        assert nodes[0].memory_bytes == 8 * 240 * GIB

    def test_nodes_by_keys_and_several_groups(self):
        first, second, third = parse_nodes(
            "1x(gpus=4,gpu=A100,cpus=64,memory=512,label=team:rl,label=zone:a)+2x(cpus=8,resource=disk:2)")
        assert (first.gpus, first.gpu, first.cpus, first.memory_bytes) == (4, A100, 64, 512 * GIB)
        assert first.labels == {"team": "rl", "zone": "a"}
        assert (second.name, third.name, third.gpus, third.memory_bytes) == ("node-1", "node-2", 0, 32 * GIB)
        assert third.custom == {"disk": 2.0}

    def test_keys_may_follow_gpus(self):
        [node] = parse_nodes("1x8xH200(cpus=16,label=ray.io/region:eu)")
        assert (node.gpu, node.cpus, node.labels) == (H200, 16, {"ray.io/region": "eu"})

    @pytest.mark.parametrize(("spec", "told"), [
        ("8xH100", "describes no machines"), ("2x", "describes no machines"), ("2x8xK80", "'K80' are not known"),
        ("1x(gpus=many)", "gpus 'many' is not an amount"), ("1x(memory=nan)", "is not an amount"),
        ("1x(cpus=-4)", "is not an amount"), ("1x(cpus=8,resource=disk:x)", "resource=disk 'x' is not an amount"),
        ("1x(ram=5)", "is not a key=value"), ("1x(label=a)", "needs a colon"),
        ("0x8xH100", "describes no machines"),
    ])
    def test_what_is_no_machine_is_refused_with_an_example(self, spec, told):
        with pytest.raises(ConfigError, match=told):
            parse_nodes(spec)

    @pytest.mark.parametrize(("name", "gpu"), [
        ("NVIDIA H100 80GB HBM3", H100), ("NVIDIA-A100-SXM4-40GB", A100_40), ("NVIDIA A100-SXM4-80GB", A100),
        ("TPU-V4", None), ("NVIDIA-L40", None), ("NVIDIA-L40S", L40S), ("NVIDIA B200", B200),
        ("NVIDIA H100 PCIe", H100_PCIE), ("NVIDIA H100 NVL", H100_NVL),
        ("NVIDIA B300 SXM6 AC", B300), ("NVIDIA GeForce RTX 4090", RTX4090), ("GeForce-RTX-5090", RTX5090),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None)])
    def test_types_are_found_as_others_write_them(self, name, gpu):
        """`nvidia-smi` and Ray's label."""
        assert gpu_of(name) is gpu


def node(name="n", cpus=8.0, gpus=0, **more):
    return Node(name, {"CPU": cpus, "GPU": gpus}, 64 * GIB, H100 if gpus else None, **more)


def where(workers, pools, *nodes):
    """The nodes of a role in each pool, whose workers fill a bundle each."""
    roles = {name: PlacementConfig(pool=name, workers=count, cpus=pools[name].cpus) for name, count in workers.items()}
    placed = place(pools, roles, nodes)
    assert not placed.shortages
    return {name: [worker.node for worker in placed.workers if worker.role == name] for name in workers}


class TestPlacement:
    """Bundles on nodes, workers on devices."""

    def test_whole_gpus_and_fractions_of_one(self):
        pools = {"a": PoolConfig(bundles=2, cpus=2, gpus=1), "b": PoolConfig(cpus=2, gpus=2)}
        placed = place(pools, {
            "policy": PlacementConfig(pool="a", workers=2, gpus=1, cpus=1),
            "generator": PlacementConfig(pool="b", gpus=1.0, cpus=0.5),
            "reward": PlacementConfig(pool="b", gpus=0.5, cpus=0.5),
            "reference": PlacementConfig(pool="b", gpus=0.5, cpus=0.5),
        }, [node("x", gpus=4)])
        where = {worker.name: worker.devices for worker in placed.workers}
        assert where == {"policy/0": (2,), "policy/1": (3,), "generator/0": (0,), "reward/0": (1,), "reference/0": (1,)}
        assert not placed.shortages

    @pytest.mark.parametrize(("strategy", "nodes"), [
        ("PACK", ["x", "x"]), ("STRICT_PACK", ["x", "x"]), ("SPREAD", ["x", "y"]), ("STRICT_SPREAD", ["x", "y"])])
    def test_strategies(self, strategy, nodes):
        pools = {"p": PoolConfig(bundles=2, cpus=2, strategy=strategy)}
        assert where({"p": 2}, pools, node("x"), node("y")) == {"p": nodes}

    def test_labels_come_first_and_are_kept(self):
        pools = {"free": PoolConfig(bundles=1, cpus=8), "bound": PoolConfig(cpus=8, labels={"role": "policy"})}
        nodes = node("x", labels={"role": "policy"}), node("y")
        assert where({"bound": 1, "free": 1}, pools, *nodes) == {"bound": ["x"], "free": ["y"]}

    @pytest.mark.parametrize(("pool", "told"), [
        (PoolConfig(cpus=2, labels={"role": "critic"}), "none of the 2 nodes has these labels"),
        (PoolConfig(cpus=9), r"8 on the largest node\. Set pools.p.cpus to 8 at most and raise pools.p.b"),
        (PoolConfig(cpus=1, gpus=1), r"1 GPU needed, 0 on the largest node\. Set pools.p.gpus to 0, or"),
        (PoolConfig(bundles=3, cpus=2, strategy="STRICT_SPREAD"), "with one per node, the nodes hold only 2"),
        (PoolConfig(bundles=5, cpus=4), "lower pools.p.bundles to 4"),
        (PoolConfig(bundles=3, cpus=4, strategy="STRICT_PACK"), "the largest node holds only 2"),
    ])
    def test_what_finds_no_place_says_what_to_change(self, pool, told):
        [shortage] = place({"p": pool}, {}, [node("x"), node("y")]).shortages
        assert re.search(told, shortage)

    def test_what_fits_alone_but_not_together_says_for_whom_there_is_no_room(self):
        pools = {"a": PoolConfig(bundles=2, cpus=4), "b": PoolConfig(bundles=3, cpus=4)}
        placed = place(pools, {}, [node("x"), node("y")])
        [shortage] = placed.shortages
        assert "not all together: pool 'a' asks for 2 bundles" in shortage
        assert "hold only 2 of the 3 bundles of pool 'b'" in shortage

    def test_an_arrangement_that_must_be_looked_for_is_the_one_planned_for(self):
        pools = {"a": PoolConfig(cpus=3), "b": PoolConfig(bundles=2, cpus=2)}
        assert where({"a": 1, "b": 2}, pools, node("x", cpus=4.0), node("y", cpus=3.0)) == {"a": ["y"], "b": ["x", "x"]}
