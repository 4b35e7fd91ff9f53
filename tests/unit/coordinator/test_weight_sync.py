"""A publication: begin, every bucket, finish; confirmed by all, or it failed."""

import asyncio

import pytest

from rlhf_ray.config.generation import WeightsConfig
from rlhf_ray.coordinator.weight_sync import AHEAD, WeightSync
from rlhf_ray.errors import WeightsError
from tests.unit.coordinator.stand_ins import StandInGroup, team_of


class Publication:
    """Stand-ins of a policy with `buckets` buckets on two ranks and of two generators; `events` in their order."""

    def __init__(self, buckets=5, confirm=lambda rank, version: version, refuse=None):
        self.buckets, self._confirm, self._refuse = buckets, confirm, refuse
        self.events, self.gathered, self.loaded, self.most_ahead = [], 0, 0, 0
        self.policy = StandInGroup("policy", self._policy, workers=2)
        self.generators = StandInGroup("generators", self._generator, workers=2)
        self.sync = WeightSync(WeightsConfig(bucket_mb=3), team_of(policy=self.policy, generators=self.generators))

    async def _policy(self, rank, method, *args):
        if method == "weight_buckets":
            self.events.append(("plan", *args))
            return self.buckets
        assert method == "weight_bucket"
        self.gathered += rank == 0
        self.most_ahead = max(self.most_ahead, self.gathered - self.loaded // 2)
        await asyncio.sleep(0.001)
        return args if rank == 0 else None

    async def _generator(self, rank, method, *args):
        self.events.append((method, rank, *args))
        await asyncio.sleep(0.002 * rank)
        if method == "load_weights":
            if (rank, args[0][1]) == self._refuse:
                raise WeightsError("bucket 1 is damaged")
            self.loaded += 1
        self.events.append((f"{method} done", rank, *args))
        return self._confirm(rank, args[0]) if method == "finish_weights" else None


def test_every_generator_begins_loads_every_bucket_in_order_and_finishes():
    it = Publication()
    seconds = asyncio.run(it.sync.publish(7))
    assert seconds > 0
    for rank in (0, 1):
        mine = [event for event in it.events if event[1] == rank and not event[0].endswith("done")]
        assert mine == [("begin_weights", rank, 7, 5), *(("load_weights", rank, (7, i)) for i in range(5)),
                        ("finish_weights", rank, 7)]


def test_nothing_is_loaded_before_all_began_and_nothing_finished_before_all_is_loaded():
    it = Publication()
    asyncio.run(it.sync.publish(1))
    names = [event[0] for event in it.events]
    assert names.index("load_weights") > max(i for i, n in enumerate(names) if n == "begin_weights done")
    assert names.index("finish_weights") > max(i for i, n in enumerate(names) if n == "load_weights done")


def test_all_policy_ranks_join_in_gathering():
    it = Publication(buckets=2)
    asyncio.run(it.sync.publish(1))
    assert it.policy.log == [("weight_buckets", 0), ("weight_buckets", 1), *[("weight_bucket", r) for r in (0, 1)] * 2]


def test_only_some_buckets_are_on_their_way_at_a_time():
    it = Publication(buckets=9)
    asyncio.run(it.sync.publish(1))
    assert it.gathered == 9 and it.most_ahead == AHEAD


def test_buckets_are_planned_once_with_the_configured_size():
    it = Publication()

    async def twice():
        await it.sync.publish(1)
        await it.sync.publish(2)

    asyncio.run(twice())
    assert [e for e in it.events if e[0] == "plan"] == [("plan", 3 * 2**20)] * 2  # once on each of two ranks
    assert [e[1:] for e in it.events if e[0] == "begin_weights"] == [(0, 1, 5), (1, 1, 5), (0, 2, 5), (1, 2, 5)]


def test_a_generator_that_confirms_another_version_fails_the_publication():
    it = Publication(confirm=lambda rank, version: version - rank)
    with pytest.raises(WeightsError, match=r"published version 7, but the generators confirmed \[7, 6\]"):
        asyncio.run(it.sync.publish(7))


def test_a_refused_bucket_fails_the_publication_before_it_is_finished():
    it = Publication(refuse=(1, 3))
    with pytest.raises(WeightsError, match="bucket 1 is damaged"):
        asyncio.run(it.sync.publish(7))
    assert not any(event[0] == "finish_weights" for event in it.events)
