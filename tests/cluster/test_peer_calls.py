"""A worker samples from two generators by calls that the driver knows nothing of, while processes of both sides are
killed, or stopped, given up and continued. Seeds are the requests' own, so completions stay the same all along. Most
tests have generators without a model; one has the real vLLM."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.run import ClusterConfig, PlacementConfig, PoolConfig
from rlhf_ray.config.stages import StageConfig
from rlhf_ray.errors import WorkerLost
from rlhf_ray.observability.faults import FaultLog
from rlhf_ray.stages.runtime import open_runtime
from rlhf_ray.workers.calls import Deadline, Fence, WorkerHandle
from rlhf_ray.workers.detectors import HeartbeatDetector, TokenProgress
from rlhf_ray.workers.dispatcher import WorkerDispatcher
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.peer_tables import PeerTables
from rlhf_ray.workers.peers import PeerGroup
from tests.cluster.peer_roles import SAMPLING, HeldAnswers, LightGenerator, RealGenerator, Runner
from tests.models import make_tiny_llama

pytestmark = pytest.mark.cluster
EPISODES = list(range(8))
TURNS = 3
LATE = 99
"""The mark of answers of a process that was given up."""
SOON = Deadline(20.0)


class Cluster:
    """A runner, two generators, and what replaces them."""

    def __init__(self, runners: WorkerDispatcher, generators: WorkerDispatcher, said: list[str]) -> None:
        self.runners = runners
        self.generators = generators
        self.said = said
        self._attempts = count()

    async def play(self):
        """All episodes, by whatever process of the runner answers."""
        return await asyncio.wait_for(self.runners.value(Runner.play, EPISODES, TURNS, next(self._attempts)), 60)

    def pid(self, dispatcher: WorkerDispatcher, rank: int) -> int:
        """Of the rank's present process."""
        return dispatcher.group.processes(rank).pid

    async def incarnation(self, dispatcher: WorkerDispatcher, rank: int, number: int) -> None:
        """Wait until the rank's process of this number is available."""
        async with asyncio.timeout(60):
            while dispatcher.group.incarnation(rank) != number or rank not in dispatcher.scheduler.up:
                await asyncio.sleep(0.05)

    async def hold(self, *ranks: int) -> None:
        """Let these generators answer no call of `sample`."""
        await asyncio.gather(*(self.generators.group.call(rank, HeldAnswers.hold, deadline=SOON).done()
                               for rank in ranks))

    async def waiting(self, rank: int, calls: int = 1) -> None:
        """Wait until so many calls wait for their answers."""
        async with asyncio.timeout(20):
            while (await counts(self.generators.group.handle(rank)))["waiting"] < calls:
                await asyncio.sleep(0.02)

    @contextmanager
    def given_up(self, dispatcher: WorkerDispatcher, rank: int):
        """Report a rank's process as lost. It is stopped, and killed when the block ends: inside it may be continued,
        and answer late. Yields a handle to it that accepts its answers."""
        group = dispatcher.group
        pid, worker = self.pid(dispatcher, rank), group.handle(rank)
        may_end, respawn = asyncio.Event(), group.respawn

        async def later(*arguments):
            await may_end.wait()
            await respawn(*arguments)

        group.respawn = later
        os.kill(pid, signal.SIGSTOP)
        dispatcher.lost(WorkerLost(f"{group.role}/{rank} was stopped", group.role, rank, group.incarnation(rank),
                                   "anything", "hung"))
        try:
            yield SimpleNamespace(pid=pid, handle=WorkerHandle(group.role, rank, worker.actor, Fence()))
        finally:
            may_end.set()
            del group.respawn


async def counts(handle: WorkerHandle) -> dict[str, int]:
    return await handle.call(HeldAnswers.counts, deadline=SOON).value()


@asynccontextmanager
async def peers(directory: Path, generator: type, heartbeat_timeout_s: float = 20.0,
                **arguments) -> AsyncIterator[Cluster]:
    """The workers, started."""
    config = StageConfig(run={"dir": str(directory)}, pools={"default": PoolConfig(cpus=4)},
                         cluster=ClusterConfig(heartbeat_timeout_s=heartbeat_timeout_s, start_timeout_s=100))
    said: list[str] = []
    health = HealthMonitor(config.cluster, FaultLog(directory / "faults.jsonl", said.append, said.append))
    async with open_runtime(config) as runtime:
        generators = WorkerDispatcher(runtime.spawn(
            "generator", generator, PlacementConfig(workers=2), lambda _: arguments), health)
        runners = WorkerDispatcher(runtime.spawn(
            "runner", Runner, PlacementConfig(),
            lambda _: {"generators": PeerGroup("generator", generators.group.deadline, SOON)}), health)
        await asyncio.gather(generators.group.start(), runners.group.start())
        tables = PeerTables(runners, generators, heartbeat_timeout_s)
        health.register(generators.scheduler)
        health.register(runners.scheduler, tables.introduce)
        await tables.send_first()
        detectors = [HeartbeatDetector(health.watched, heartbeat_timeout_s, health.silent),
                     TokenProgress(generators.scheduler, health, heartbeat_timeout_s)]
        async with health.at_work([*detectors, tables]):
            yield Cluster(runners, generators, said)


@pytest.fixture(scope="module")
def expected():
    """What the episodes of generators without a model are, made in this process."""
    async def play():
        generator = LightGenerator()

        class Alone:
            async def call(self, method, requests, **_):
                return await generator.sample(requests)

        return await Runner(Alone()).play(EPISODES, TURNS, 0)

    return asyncio.run(play())


async def killed_generator(cluster: Cluster, expected) -> None:
    """The runner finds out, and goes on with the other one; the driver, which hears of it from the runner, replaces the
    dead one, whose successor gets calls again."""
    await cluster.hold(0)
    playing = asyncio.create_task(cluster.play())
    await cluster.waiting(0)
    os.kill(cluster.pid(cluster.generators, 0), signal.SIGKILL)
    assert await playing == expected
    await cluster.incarnation(cluster.generators, 0, 2)
    assert "generator/0 died in sample" in cluster.said[0] and "generator/0 is back" in cluster.said[1]
    assert await cluster.play() == expected
    assert (await counts(cluster.generators.group.handle(0)))["answered"] >= TURNS


async def late_generator(cluster: Cluster, expected) -> None:
    """Answers of a generator that was given up come while the runner still plays, and are refused."""
    await cluster.hold(0, 1)
    playing = asyncio.create_task(cluster.play())
    await cluster.waiting(0)
    await cluster.waiting(1)
    with cluster.given_up(cluster.generators, 1) as late:
        await cluster.waiting(0, len(EPISODES))
        os.kill(late.pid, signal.SIGCONT)
        await late.handle.call(HeldAnswers.release, LATE, deadline=SOON).done()
        assert (await counts(late.handle))["answered"] > 0
        assert not playing.done(), "the late answers are refused, and generator/0 still holds its own"
        await cluster.generators.group.call(0, HeldAnswers.release, 0).done()
        assert await playing == expected
    await cluster.incarnation(cluster.generators, 1, 2)
    assert await cluster.play() == expected
    assert (await counts(cluster.generators.group.handle(1)))["answered"] >= TURNS


async def late_runner(cluster: Cluster, expected) -> None:
    """A runner that was given up goes on to call: it is refused by the generators, and its answer by the driver; its
    requests end at once, and its successor plays the same."""
    await cluster.hold(0, 1)
    group = cluster.runners.group
    late_play = group.call(0, Runner.play, EPISODES, TURNS, -1)
    await cluster.waiting(0)
    with cluster.given_up(cluster.runners, 0) as late:
        handles = [cluster.generators.group.handle(rank) for rank in (0, 1)]
        async with asyncio.timeout(10):
            while any([(await counts(handle))["waiting"] for handle in handles]):
                await asyncio.sleep(0.02)
        answered = [await counts(handle) for handle in handles]
        os.kill(late.pid, signal.SIGCONT)
        again = late.handle.call(Runner.play, EPISODES, TURNS, -2, deadline=SOON)
        for refused in (late_play.refs[0], again.refs[0]):
            with pytest.raises(WorkerLost, match=r"runner/0 calls sample from its process 1, which was given up \(the "
                                                 r"newest is 2\)"):
                await refused
        with pytest.raises(WorkerLost, match="runner/0 was given up while play was under way"):
            await late_play.value()
        assert [await counts(handle) for handle in handles] == answered
    for rank in (0, 1):
        await cluster.generators.group.call(rank, HeldAnswers.release, 0).done()
    assert await cluster.play() == expected
    assert group.incarnation(0) == 2 and cluster.pid(cluster.runners, 0) != late.pid


def test_completions_stay_the_same_and_nothing_late_is_accepted(shared_ray, tmp_path, expected):
    async def run():
        async with peers(tmp_path, LightGenerator) as cluster:
            assert await cluster.play() == expected
            await late_generator(cluster, expected)
            await late_runner(cluster, expected)

    asyncio.run(run())


@pytest.mark.slow
def test_a_killed_generator_is_replaced_though_only_the_runner_calls_it(shared_ray, tmp_path, expected):
    async def run():
        async with peers(tmp_path, LightGenerator) as cluster:
            await killed_generator(cluster, expected)

    asyncio.run(run())


@pytest.mark.slow
def test_a_stopped_generator_is_found_out_though_the_driver_calls_it_not(shared_ray, tmp_path, expected):
    """The driver learns from the runner that calls are under way."""
    async def run():
        async with peers(tmp_path, LightGenerator, heartbeat_timeout_s=5.0) as cluster:
            await cluster.hold(1)
            playing = asyncio.create_task(cluster.play())
            await cluster.waiting(1)
            began = time.monotonic()
            os.kill(cluster.pid(cluster.generators, 1), signal.SIGSTOP)
            assert await playing == expected
            assert 5 < time.monotonic() - began < 20
            assert "generator/1 produced no token for" in cluster.said[0] or "no sign of life" in cluster.said[0]
            assert "while sample was under way for" in cluster.said[0]

    asyncio.run(run())


@pytest.mark.slow
def test_with_the_real_vllm_completions_stay_the_same_and_nothing_late_is_accepted(shared_ray, tmp_path):
    model = make_tiny_llama(tmp_path / "policy", 512, tied=False)
    generation = GenerationConfig(max_sequences=8, kv_cache_mb=8, sampling=SAMPLING)

    async def run():
        async with peers(tmp_path, RealGenerator, model=ModelConfig(path=str(model)), generation=generation, seed=0,
                         max_context=64) as cluster:
            expected = await cluster.play()
            assert len({tokens for turns in expected.values() for tokens, _ in map(repr_of, turns)}) > len(EPISODES)
            await killed_generator(cluster, expected)
            await late_generator(cluster, expected)
            await late_runner(cluster, expected)

    asyncio.run(run())


def repr_of(turn: tuple[list[int], list[int]]) -> tuple[str, str]:
    """A turn's tokens and versions, hashable."""
    tokens, versions = turn
    return str(tokens), str(versions)
