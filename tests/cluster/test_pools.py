"""Pools on several nodes of a real Ray: who lands where, what is refused at once, what is waited for, what grows."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_ray.cluster.resource_pools import Pools
from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.errors import ClusterError, WorkerLost
from rlhf_ray.stages.runtime import open_runtime
from tests.cluster.nodes import cluster_of
from tests.cluster.reader import BYTES, Reader

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def pool(kind, **fields):
    return PoolConfig(**{"cpus": 2, "labels": {"kind": kind}, **fields})


@pytest.fixture(scope="module")
def three(own_ray):
    """Nodes `gen`, `learn` and `spare` with 4 CPUs each; this process joins them as a driver on the head."""
    from rlhf_ray.cluster.session import ray_session

    loop = asyncio.new_event_loop()
    with cluster_of("gen", "learn", "spare") as nodes:
        config = ClusterConfig(address=nodes.address, allow_open=True, start_timeout_s=60)
        with ray_session(config, {}, "pools"):
            yield SimpleNamespace(nodes=nodes, config=config, do=loop.run_until_complete)
    loop.close()


def staged(three, directory="runs/nowhere", **pools):
    return StageConfig(pools=pools, cluster=three.config, run={"dir": str(directory)})


def node_of(group, rank):
    return group.processes(rank).node


def test_roles_land_where_the_labels_of_their_pools_say_and_one_copy_of_a_result_reaches_each_node(three, tmp_path):
    async def work():
        config = staged(three, tmp_path, learn=pool("learn"),
                        gen=pool("in(gen, spare)", bundles=2, strategy="STRICT_SPREAD"))
        async with open_runtime(config) as place:
            learner = place.spawn("learner", Reader, PlacementConfig(pool="learn", workers=1), lambda _: {})
            readers = place.spawn("reader", Reader, PlacementConfig(pool="gen", workers=4), lambda _: {})
            await asyncio.gather(learner.start(), readers.start())
            ids = three.nodes.ids()
            assert node_of(learner, 0) == ids["learn"]
            assert sorted(node_of(readers, rank) for rank in range(4)) == sorted([ids["gen"], ids["spare"]] * 2)
            assert {readers.seat(rank).bundle for rank in (0, 1)} == {0, 1}, "neighbours in rank are spread"
            before = stored(ids)
            made = learner.call(0, Reader.make)
            assert await readers.values(Reader.read, made.ref) == [BYTES] * 4
            after = stored(ids)
        received = {kind: after[kind] - before[kind] for kind in ids}
        assert all(BYTES <= received[kind] < 1.1 * BYTES for kind in ("learn", "gen", "spare")), received
        assert received["head"] < 2**20, "the driver's node holds none"

    three.do(work())


async def lost_in(call):
    """The error of a call that no answer comes to."""
    with pytest.raises(WorkerLost) as caught:
        await call.done()
    return caught.value


def stored(ids):
    """Bytes that have ever been written into each node's object store, by kind."""
    import ray
    from ray._private.internal_api import node_stats

    found = {node["NodeID"]: node for node in ray.nodes()}
    stats = {kind: node_stats(found[id_]["NodeManagerAddress"], found[id_]["NodeManagerPort"], False)
             for kind, id_ in ids.items()}
    return {kind: answer.store_stats.cumulative_created_bytes for kind, answer in stats.items()}


@pytest.mark.parametrize("pools, words", [
    ({"a": pool("tpu"), "b": pool("gen")}, ["pool 'a' asks for 1 bundle of 2 CPU on nodes labelled kind=tpu",
                                            "has these labels", "kind=learn", "cluster.nodes_may_join"]),
    ({"a": pool("gen", cpus=5)}, ["5 CPU needed, 4 on the largest node"]),
    ({"a": pool("gen", resources={"nvme": 1})}, ["1 nvme needed, 0 on the largest"]),
    ({"a": pool("gen", cpus=3), "b": pool("gen", cpus=2)}, [
        "not all together: pool 'a' asks", "hold only 0 of the 1 bundle of pool 'b'"]),
])
def test_what_no_node_could_ever_hold_is_refused_at_once(three, pools, words):
    began = time.monotonic()
    with pytest.raises(ClusterError) as refused:
        three.do(Pools(pools).open(60))
    assert [word for word in words if word not in str(refused.value)] == []
    assert time.monotonic() - began < 10


def test_what_is_only_busy_is_waited_for_and_told_of_and_nothing_is_kept_when_time_is_over(three, monkeypatch):
    from rlhf_ray.cluster import resource_pools as module

    monkeypatch.setattr(module, "SAY_AFTER_S", 0.3)
    said = []

    async def work():
        first, second = Pools({"a": pool("gen", cpus=4)}), Pools({"b": pool("gen", cpus=3), "c": pool("learn")})
        await first.open(60)
        with pytest.raises(ClusterError, match=r"(?s)pool 'b' found no place within 1 s .*0 of 4 CPU.*b: 0 now, 1 wh"):
            await second.open(1, said.append)
        assert said == ["waiting for room for pool 'b' until others free it, 1 s at most "
                        "(cluster.start_timeout_s)"]
        whole = Pools({"c": pool("learn", cpus=4)})
        await whole.open(20)  # the part of `second` that was placed is given back
        whole.close()
        again = asyncio.create_task(second.open(60))
        await asyncio.sleep(0.5)
        assert not again.done()
        first.close()
        await again
        second.close()

    three.do(work())


def test_a_node_that_joins_is_waited_for_where_that_may_happen(three):
    async def work():
        pools = Pools({"late": pool("late")}, cluster=ClusterConfig(nodes_may_join=True))
        opening = asyncio.create_task(pools.open(60))
        await asyncio.sleep(0.3)
        three.nodes.add("late")  # Ray starts nodes from the main thread alone
        await opening
        assert pools.nodes_of("late") == {three.nodes.ids()["late"]}
        pools.close()
        three.nodes.remove("late")

    three.do(work())


def test_a_group_gets_another_worker_by_a_bundle_of_its_own_and_gives_it_back(three):
    async def work():
        async with open_runtime(staged(three, gen=pool("gen"))) as place:
            group = place.spawn("reader", Reader, PlacementConfig(pool="gen", workers=2, cpus=1), lambda _: {})
            await group.start()
            assert await group.add(20) == 2 and group.seat(2).bundle == 1
            assert await group.add(20) == 3 and group.seat(3).bundle == 1, "there was room left"
            await asyncio.gather(group.start_one(2), group.start_one(3))
            with pytest.raises(ClusterError, match=r"(?s)pools.gen is full, and the cluster has no room.*0 of 4 CPU"):
                await group.add(20)
            await group.remove(1, "it was removed")
            assert group.ranks == [0, 2, 3] and len(group) == 3
            assert (await lost_in(group.call(1, Reader.start))).kind == "stale", "whoever still calls it is told"
            assert await group.add(20) == 4 and group.seat(4).bundle == 0
            await group.start_one(4)
            await asyncio.gather(group.remove(2, "gone"), group.remove(3, "gone"))
            assert await group.values(Reader.read, np.zeros(3, np.uint8)) == [3, 3]
            alone = Pools({"x": pool("gen", cpus=2)})
            await alone.open(20)  # the second bundle was given back to the cluster
            alone.close()

    three.do(work())
