"""Learners on real ranks: processes that join once for all tests here, and build one learner after another."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.stages.runtime import open_runtime, start_learners
from tests.cluster.learners.learner_bench import LearnerBench
from tests.cluster.learners.plain_torch import make_experiences
from tests.threads import one_torch_thread


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of ZeRO stages and numbers of ranks, the default suite keeps two ranks at stage 3, which shards everything; of
    loads by new processes, the policy's."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not _is_kept(item):
            item.add_marker(pytest.mark.slow)


def _is_kept(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    before, after = parameters.get("before", (2, 3)), parameters.get("after", (1, 3))
    if "fresh_ranks" in item.fixturenames and parameters.get("cls") != "PolicyLearner":
        return False
    return (parameters.get("world", 2), parameters.get("zero", 3), before, after) == (2, 3, (2, 3), (1, 3))


@pytest.fixture(scope="package")
def floor(shared_ray):
    """A runtime with room for all ranks, and a loop to call them from; benches are made once."""
    from rlhf_ray.cluster.session import ray_session

    config = StageConfig(pools={"default": PoolConfig(cpus=2)},
                         cluster=ClusterConfig(dashboard=False, object_store_mb=128, call_timeout_s=120))
    loop = asyncio.new_event_loop()
    with one_torch_thread(), ray_session(config.cluster, config.pools, "learners"):
        room = open_runtime(config)
        place = loop.run_until_complete(room.__aenter__())
        try:
            yield SimpleNamespace(loop=loop, spawn=lambda ranks, name: spawn(place, ranks, name),
                                  spawn_role=place.spawn)
        finally:
            loop.run_until_complete(room.__aexit__(None, None, None))
            loop.close()


def spawn(place, ranks, name):
    return place.spawn(name, LearnerBench, PlacementConfig(workers=ranks, cpus=0.1),
                       lambda rank: {"rank": rank, "world": ranks}, shutdown=LearnerBench.leave)


class Ranks:
    """Processes of one world size, called from plain functions."""

    def __init__(self, floor, groups):
        self._loop, self._groups = floor.loop, groups

    def make(self, ranks, cls, arguments, chunk_elements=None):
        """Let the ranks build a learner; see `LearnerBench.make`."""
        self._group = self._groups[ranks]
        self.compiled = self._values(LearnerBench.make, cls, arguments, chunk_elements)[0]
        return self

    def do(self, method, *args):
        """The learners' answers, by rank."""
        return self._values(LearnerBench.do, method, *args)

    def save(self, directory):
        """Write a checkpoint's part of each rank."""
        self._values(LearnerBench.save, str(directory))

    def spoil(self, rank):
        """See `LearnerBench.spoil`."""
        self._values(LearnerBench.spoil, rank)

    def leave_out(self, step):
        """See `LearnerBench.leave_out`."""
        self._values(LearnerBench.leave_out, step)

    def weights(self, which="weights"):
        """Rank 0's view of the weights; all ranks must agree."""
        found = self._values(getattr(LearnerBench, which))
        for other in found[1:]:
            assert all(np.array_equal(other[name], found[0][name]) for name in other)
        return found[0]

    def _values(self, method, *args):
        return self._loop.run_until_complete(self._group.values(method, *args))


@pytest.fixture(scope="package")
def ranks(floor):
    """Benches of one and of two ranks."""
    groups = {n: floor.spawn(n, f"bench_of_{n}") for n in (1, 2)}

    async def start():
        await asyncio.gather(*(start_learners(group, 300) for group in groups.values()))

    floor.loop.run_until_complete(start())
    return Ranks(floor, groups)


@pytest.fixture(scope="package")
def fresh_ranks(floor):
    """Two ranks in other processes."""
    group = floor.spawn(2, "fresh_bench")
    floor.loop.run_until_complete(start_learners(group, 300))
    return Ranks(floor, {2: group})


@pytest.fixture(scope="package")
def experiences(files):
    return make_experiences(files)
