"""Turns on shared GPUs, and publications from GPU to GPU: who is told what, in which order."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_ray.config.generation import GenerationConfig, WeightsConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.coordinator.colocation import Phases
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.records import PublicationSize, WeightRoute, WeightsConfirmed, WeightsPlan
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of


class Roles:
    """Stand-ins of two generators, two policy ranks and a critic; `events` in their order."""

    def __init__(self, sleep=0, offload=(), transport="object_store"):
        self.events, self.incarnations = [], {}
        groups = {name: self._group(name, workers) for name, workers in
                  (("generators", 2), ("policy", 2), ("critic", 1))}
        self.roles = role_groups_of(**groups)
        self.phases = Phases(
            GenerationConfig().model_copy(update={"sleep_level": sleep}),
            PolicyConfig().model_copy(update={"offload_between_phases": "policy" in offload}),
            CriticConfig().model_copy(update={"offload_between_phases": "critic" in offload}), self.roles)
        weights = WeightsConfig().model_copy(update={"transport": transport})
        self.sync = WeightSync(weights, self.roles, phases=self.phases)

    def _group(self, name, workers):
        async def answer(rank, method, *args):
            self.events.append((name, method, rank, *args))
            await asyncio.sleep(0)
            return {"plan_weights": WeightsPlan(PublicationSize(2, 8), PublicationSize(1, 4)), "fused_groups": [],
                    "finish_weights": WeightsConfirmed(args[0] if args else 0, 0.1), "devices": rank + 1,
                    "unchanged_weights": {"frozen": "d"},
                    "broadcast_route": WeightRoute("nccl", args[1], nccl_id=args[0]) if args[1:] else None,
                    "offer_bucket": (name, *args)}.get(method)

        group = StandInGroup(name, answer, workers)
        group.incarnation = lambda rank: self.incarnations.get((name, rank), 1)
        group.processes = lambda rank: SimpleNamespace(host="10.0.0.1")
        return group

    def methods(self):
        """(group, method) in order, ranks of a call as one."""
        found = []
        for name, method, *_ in self.events:
            if not found or found[-1] != (name, method):
                found.append((name, method))
        return found

    def of(self, method):
        return [event for event in self.events if event[1] == method]


def step(roles, *versions, between=lambda: None):
    async def each():
        for version in versions:
            await roles.phases.learning()
            roles.events.append(("", "update", 0))
            await roles.sync.publish(version)
            between()

    asyncio.run(each())


@pytest.fixture
def roles():
    return Roles


def test_by_default_nobody_gives_way(roles):
    it = roles()
    step(it, 1)
    assert not it.of("sleep") and not it.of("wake") and not it.of("offload_state") and not it.of("reload_state")


def test_each_gives_back_before_the_other_takes(roles):
    it = roles(sleep=1, offload=("policy", "critic"))
    step(it, 1)
    order = [event[:2] for event in it.events]
    places = [order.index(event) for event in (
        ("generators", "sleep"), ("policy", "reload_state"), ("", "update"), ("policy", "offload_state"),
        ("generators", "wake"), ("generators", "begin_weights"), ("generators", "finish_weights"))]
    assert places == sorted(places)
    assert [event[2:] for event in it.of("wake")] == [
        (0, ["weights"]), (1, ["weights"]), (0, ["kv_cache"]), (1, ["kv_cache"])]
    assert order.index(("generators", "finish_weights")) < len(order) - 2, "the cache comes last"
    assert {event[0] for event in it.of("offload_state")} == {"policy", "critic"}


def test_only_who_was_asked_to_puts_its_state_aside(roles):
    it = roles(offload=("critic",))
    step(it, 1)
    assert {event[0] for event in it.of("reload_state")} == {"critic"}


def test_weights_that_were_dropped_come_whole_each_time(roles):
    for level, sent in ((1, [2, 1]), (2, [2, 2])):
        it = roles(sleep=level)
        step(it, 1, 2)
        assert [event[5] for event in it.of("begin_weights") if event[2] == 0] == sent


class TestFromGPUToGPU:
    def test_learner_and_generators_meet_once_and_each_knows_its_place(self, roles):
        it = roles(transport="nccl")
        step(it, 1, 2)
        met = it.of("connect_weights")
        assert len(met) == 4
        routes = {event[0]: event[3] for event in met}
        assert routes["policy"] == routes["generators"] == WeightRoute("nccl", 4, nccl_id="10.0.0.1")
        assert [event[2] for event in it.of("broadcast_route")] == [0], "the first rank's alone"
        assert {event[2]: event[4] for event in met if event[0] == "generators"} == {0: 1, 1: 2}

    def test_they_meet_anew_when_one_of_them_is_new(self, roles):
        it = roles(transport="nccl")
        step(it, 1, 2, between=lambda: it.incarnations.update({("generators", 1): 2}))
        assert len(it.of("connect_weights")) == 8

    def test_every_bucket_is_offered_sent_and_loaded_and_then_released(self, roles):
        it = roles(transport="nccl")
        step(it, 1)
        assert [event[3:] for event in it.of("offer_bucket") if event[2] == 0] == [(1, 0, True), (1, 1, True)]
        assert len(it.of("send_bucket")) == 4
        loaded = [event[3] for event in it.of("load_weights") if event[2] == 0]
        assert loaded == [("policy", 1, 0, True), ("policy", 1, 1, True)]
        assert not it.of("weight_bucket")
        released = it.methods().index(("policy", "release_weights"))
        assert it.methods().index(("generators", "finish_weights")) < released

    def test_handles_need_no_broadcast(self, roles):
        it = roles(transport="ipc")
        step(it, 1)
        assert not it.of("send_bucket") and not it.of("broadcast_route")
        assert {event[3].transport for event in it.of("connect_weights")} == {"ipc"}
