"""A chunk that is cancelled ends its episodes at the runner, and their requests at the generators. Ray and the engine
are stand-ins; the calls, the runner and the worker's side are real."""

import asyncio

import numpy as np
import pytest

from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.rollout_source import EpisodeSource, RolloutSource
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.replay.chunk import Chunk
from rlhf_ray.workers.calls import Caller, Deadline, Fence, WorkerHandle
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.peers import Peer, PeerGroup, PeerTable
from tests.unit.coordinator.harnesses import PipelineHarness
from tests.unit.coordinator.stand_ins import StandInGroup, silent
from tests.unit.roles.test_episode_policies import DONE, World, runner_of
from tests.unit.workers.local_actors import LocalActor, process_of

SOON = Deadline(50.0)


class Held:
    """A generator that answers nothing; ending a request takes a while."""

    def __init__(self):
        self.open = 0

    async def sample(self, requests):
        """As `Generator.sample`."""
        self.open += 1
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.02)
            self.open -= 1


class Rows:
    """The prompts of five rows."""

    async def read_for(self, keys):
        return Prompts(np.arange(6), np.zeros(5, np.int32), ["go"] * 5, [{}] * 5, np.arange(5))


class PlayingGroup(StandInGroup):
    """One episode runner, whose calls reach the worker."""

    def __init__(self, actor):
        super().__init__("episode_runner", silent)
        self.handle = WorkerHandle("episode_runner", 0, actor, Fence())

    def call(self, rank, method, *args, deadline, **named):
        return self.handle.call(method, *args, deadline=deadline, **named)


@pytest.mark.parametrize("held_out", [False, True])
def test_when_a_cancelled_chunk_is_over_no_generator_has_a_request_of_its_episodes(held_out):
    async def run():
        generators = [process_of(Held) for _ in range(2)]
        peers = PeerGroup("generator", SOON, SOON)
        peers.update(PeerTable(1, Caller("episode_runner", 0, 1), {
            rank: Peer(1, None, LocalActor(worker)) for rank, worker in enumerate(generators)}, None))
        world = World(DONE)
        runner = runner_of({"world": world}, peers, {})
        worker = process_of(type(runner), environments={}, model=None, sampling=None, generators=peers)
        worker.play = runner.play
        dispatcher = WorkerDispatcher(PlayingGroup(LocalActor(worker)), HealthMonitor(ClusterConfig()))
        source = RolloutSource(dispatcher, Rows(), 5, episodes=EpisodeSource(dispatcher, SOON, held_out))
        chunk = Chunk.outside([SampleKey(0, row, 0) for row in range(5)])
        generating = asyncio.create_task(source.generate(chunk))
        await asyncio.sleep(0.05)
        began = [worker.open for worker in generators], len(runner.activity())
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        return began, [worker.open for worker in generators], runner.activity()

    began, still_open, activity = asyncio.run(run())
    assert began == ([3, 2], 5)
    assert (still_open, activity) == ([0, 0], [])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_pipeline_that_is_closed_leaves_no_work_at_its_generators(ppo_config, summary, staleness):
    async def run():
        harness = PipelineHarness(ppo_config(staleness=staleness), summary)
        may_end = asyncio.Event()

        async def delay():
            try:
                await may_end.wait()
            finally:
                await asyncio.sleep(0.02)  # until the engine has aborted it

        harness.delay = delay
        waiting = asyncio.create_task(harness.pipeline.next_batch())
        async with asyncio.timeout(10):
            while not harness.generating:
                await asyncio.sleep(0.001)
        await harness.pipeline.close()
        waiting.cancel()
        return harness.most_generating, harness.generating

    most, left = asyncio.run(run())
    assert most > 0 and left == 0
