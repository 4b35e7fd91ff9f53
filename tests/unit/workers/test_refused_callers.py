"""A runner that was given up and goes on: every generator refuses it from its loss on, also one that started later, and
what it had under way ends at once."""

import asyncio

import pytest

from rlhf_ray.config.generation import GenerationConfig, SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.errors import WorkerLost
from rlhf_ray.roles.engines.interface import SampleRequest
from rlhf_ray.roles.generator import Generator
from rlhf_ray.workers.calls import Caller, Deadline, Fence, WorkerHandle
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.peer_tables import PeerTables
from rlhf_ray.workers.peers import PeerGroup
from tests.unit.workers.local_actors import LocalActor, process_of
from tests.unit.workers.local_groups import local_group

STALE = Caller("runner", 0, 1)
SOON = Deadline(50.0)
REQUEST = SampleRequest([5, 6], SamplingConfig(max_tokens=4), 2, 11, [1])


class Engine:
    """Samples without end, and knows its open requests."""

    def __init__(self):
        self.open = 0

    async def sample(self, requests):
        self.open += len(requests)
        try:
            await asyncio.sleep(1000)
        finally:
            self.open -= len(requests)


class Receiver:
    """The weights are confirmed."""

    def require_ready(self):
        pass


def started_generator():
    """The process of a generator whose engine is a stand-in."""
    worker = process_of(Generator, model=ModelConfig(path="m"), generation=GenerationConfig(), seed=0, max_context=64)
    worker._engine, worker._receiver = Engine(), Receiver()
    return LocalActor(worker)


class Runner:
    """A role with peers."""

    def __init__(self, generators):
        pass

    async def play(self):
        """Its method."""


class Cluster:
    """Two runners, two generators and the tables between them."""

    def __init__(self, monkeypatch):
        self.health = HealthMonitor(ClusterConfig(heartbeat_timeout_s=20.0))
        self.actors = {rank: started_generator() for rank in range(2)}

        def group(role):
            made = local_group(monkeypatch, None, role=role, workers=2, call_timeout_s=50.0)
            made.own_call = lambda rank, method, *args, **_: self._call(role, made, rank, method, args)
            return made

        self.generators = WorkerDispatcher(group("generator"), self.health)
        self.runners = WorkerDispatcher(group("runner"), self.health)
        self.tables = PeerTables(self.runners, self.generators, 20.0)

    def _call(self, role, group, rank, method, args):
        actor = self.actors[rank] if role == "generator" else LocalActor(
            process_of(Runner, generators=PeerGroup("generator", SOON, SOON)))
        return WorkerHandle(role, rank, actor, Fence()).call(method, *args, deadline=SOON)

    def engine(self, rank):
        return self.actors[rank].worker._engine

    async def call_as_the_stale(self, rank):
        """A call of the given-up runner, whose handle is of the present process."""
        handle = WorkerHandle("generator", rank, self.actors[rank], Fence(), STALE)
        return handle.call(Generator.sample, [REQUEST], deadline=SOON)

    async def give_up(self, dispatcher, rank):
        dispatcher.scheduler.leave_out(rank)
        dispatcher.group.give_up(rank, "it was stopped")
        await asyncio.sleep(0.01)

    async def replace_generator(self, rank):
        await self.give_up(self.generators, rank)
        await self.generators.group.respawn(rank)
        self.actors[rank] = started_generator()
        self.generators.scheduler.take_back(rank)
        await asyncio.sleep(0.01)


async def is_refused(call):
    with pytest.raises(WorkerLost, match=r"runner/0 calls sample from its process 1, which was given up \(the newest "
                                         r"is 2\)"):
        await asyncio.wait_for(call.value(), 5)


def test_every_generator_refuses_a_runner_that_was_given_up_also_one_that_was_restarted_since(monkeypatch):
    async def run():
        it = Cluster(monkeypatch)
        await it.tables.send_first()
        it.generators.scheduler.leave_out(1)  # it is about to be removed, and gets no new calls
        under_way = [await it.call_as_the_stale(rank) for rank in range(2)]
        await asyncio.sleep(0.01)
        assert [it.engine(rank).open for rank in range(2)] == [1, 1]
        await it.give_up(it.runners, 0)
        assert [it.engine(rank).open for rank in range(2)] == [0, 0], "before there is a successor"
        for call in under_way:
            await is_refused(call)
        it.generators.scheduler.take_back(1)
        for rank in range(2):
            await it.replace_generator(rank)
        for rank in range(2):
            await is_refused(await it.call_as_the_stale(rank))
            assert it.engine(rank).open == 0

    asyncio.run(run())


def test_a_process_that_was_lost_before_it_was_back_is_refused_as_well(monkeypatch):
    """It had a table, but was never given out; its successor is the first that generators hear of."""
    async def run():
        it = Cluster(monkeypatch)
        await it.tables.send_first()
        it.runners.scheduler.leave_out(0)
        it.runners.group.give_up(0, "it was stopped")
        await it.runners.group.respawn(0)
        await it.tables.introduce(0, lambda: None)
        await asyncio.sleep(0.01)
        for rank in range(2):
            await is_refused(await it.call_as_the_stale(rank))

    asyncio.run(run())
