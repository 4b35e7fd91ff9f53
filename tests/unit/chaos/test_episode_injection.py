"""Faults in episodes wait until an episode is where they need it, and hit the worker that they mean."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from chaos import environments
from chaos.driver_under_test import DriverUnderTest
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.kinds import KINDS, episodes
from rlhf_ray.errors import WorkerLost
from rlhf_ray.roles.episode_runner import EpisodeRunner


class Answer:
    def __init__(self, value):
        self._value = value

    async def value(self):
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Group:
    """Two workers, each a process that sleeps; runners answer what their episodes do."""

    ranks = [0, 1]

    def __init__(self, role, pids):
        self.role, self.pids, self.doing = role, pids, [[], []]
        self.made = []

    def call(self, rank, method, *arguments, **named):
        self.made.append(rank)
        return Answer(self.doing[rank])

    def processes(self, rank):
        return SimpleNamespace(pid=self.pids[rank])

    def incarnation(self, _):
        return 1


@pytest.fixture
def pids():
    children = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(4)]
    yield [child.pid for child in children]
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def driver(tmp_path, pids):
    found = DriverUnderTest([], InjectionLog(tmp_path / "injections.jsonl"))
    runners, generators = Group("episode_runner", pids[:2]), Group("generator", pids[2:])
    found.coordinator = SimpleNamespace(
        state=SimpleNamespace(step=3, unmeasured=0),
        roles=SimpleNamespace(runners=runners, generators=generators, all_groups=lambda: [runners, generators],
                              health=SimpleNamespace(down={})),
        recovery=SimpleNamespace(store=SimpleNamespace(steps=lambda: [(2, Path("step_2"))])))
    return found


def activity(turn, doing="a generator", row=5):
    return {"key": [0, row, 0], "environment": "talk", "turn": turn, "doing": doing, "since_s": 0.1, "age_s": 1.0}


async def injecting(driver, kind, rank=0, **more):
    fault = Fault(1, kind, 1, rank=rank, **more)
    driver.left = [fault]
    task = asyncio.create_task(KINDS[kind].inject(driver, fault))
    await asyncio.sleep(0.1)
    return task


async def over(driver, task):
    await asyncio.wait_for(task, 5)
    for each in list(driver.confirming):
        await asyncio.wait_for(each, 5)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def paused_at(driver, runner, number=1):
    """Let the environment of this runner obey the order to pause."""
    place = driver.injections.path
    while not environments.order_file(place).exists():
        await asyncio.sleep(0.01)
    order = json.loads(environments.order_file(place).read_text())
    assert (order["failure"], order["runner"]) == ("pause", runner)
    environments.paused_file(place, number).write_text("{}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_runner_is_hit_while_an_episode_of_its_own_pauses(driver, pids, rank):
    async def run():
        task = await injecting(driver, "runner_kill", rank=rank)
        assert driver.injections.read() == []
        await paused_at(driver, pids[rank])
        await over(driver, task)

    asyncio.run(run())
    (line,) = driver.injections.read("injected")
    assert (line["role"], line["rank"], line["pid"]) == ("episode_runner", rank, pids[rank])
    assert [gone(pid) for pid in pids[:2]] == [rank == 0, rank == 1] and driver.injections.read("confirmed")
    assert not environments.paused_file(driver.injections.path, 1).exists()


def test_the_order_is_given_again_where_the_runner_was_lost_meanwhile(driver, pids):
    async def run():
        task = await injecting(driver, "runner_kill")
        psutil.Process(pids[0]).kill()
        environments.order_file(driver.injections.path).unlink()
        driver.coordinator.roles.runners.pids = [pids[1], pids[1]]
        await paused_at(driver, pids[1])
        await over(driver, task)

    asyncio.run(run())
    assert gone(pids[1])


def test_the_runner_that_looks_into_journals_after_a_loss_is_hit(driver, pids):
    async def run():
        runners = driver.coordinator.roles.runners
        task = await injecting(driver, "runner_kill_in_replay", delay_s=0.01)
        looks = SimpleNamespace(look=True)
        runners.call(0, EpisodeRunner.play, "prompts", looks)
        driver.coordinator.roles.health.down["episode_runner", 0] = SimpleNamespace(recorded=False)
        runners.call(0, EpisodeRunner.play, "prompts", SimpleNamespace(look=False))
        await asyncio.sleep(0.05)
        assert driver.injections.read() == []
        runners.call(1, EpisodeRunner.play, "prompts", journal=looks)
        await over(driver, task)

    asyncio.run(run())
    assert [gone(pid) for pid in pids] == [False, True, False, False]


def test_a_generator_is_hit_while_an_environment_pauses(driver, pids, tmp_path):
    async def run():
        driver.coordinator.roles.health.down["generator", 1] = SimpleNamespace(recorded=False)
        task = await injecting(driver, "generator_kill_between_turns", rank=1)
        place = driver.injections.path
        assert not environments.order_file(place).exists(), "it is being replaced"
        driver.coordinator.roles.health.down.clear()
        await asyncio.sleep(0.1)
        assert '"pause"' in environments.order_file(place).read_text() and not gone(pids[3])
        environments.paused_file(place, 1).write_text("{}")
        await over(driver, task)
        assert not environments.paused_file(place, 1).exists()

    asyncio.run(run())
    assert [gone(pid) for pid in pids] == [False, False, False, True]


def test_a_stopped_generator_s_episode_waits_for_it(driver, pids):
    async def run():
        runners = driver.coordinator.roles.runners
        runners.doing = [[activity(2, "the environment")], [activity(1)]]
        task = await injecting(driver, "generator_stop_in_turn")
        assert driver.injections.read() == []
        runners.doing[0] = WorkerLost("it does not answer")
        runners.doing[1] = [activity(1), activity(2)]
        await over(driver, task)

    asyncio.run(run())
    assert psutil.Process(pids[2]).status() == psutil.STATUS_STOPPED


def test_a_stopped_runner_is_woken_up_when_it_was_replaced(driver, pids):
    async def run():
        runners = driver.coordinator.roles.runners
        task = await injecting(driver, "runner_stop")
        await paused_at(driver, pids[0])
        await task
        await asyncio.sleep(0.1)
        assert psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED
        runners.incarnation = lambda rank: 2
        await over(driver, task)

    asyncio.run(run())
    assert psutil.Process(pids[0]).status() != psutil.STATUS_STOPPED


def test_a_driver_is_killed_where_its_episodes_are_of_the_newest_checkpoint(driver, monkeypatch):
    killed = []
    monkeypatch.setattr(episodes.os, "kill", lambda pid, number: killed.append(number))

    async def run():
        place = driver.injections.path
        environments.paused_file(place, 1).write_text("of an attempt before")
        task = await injecting(driver, "driver_kill_in_episodes")
        assert '"pause"' in environments.order_file(place).read_text()
        environments.paused_file(place, 1).write_text("{}")
        await asyncio.sleep(0.1)
        assert killed == [], "the checkpoint of step 3 is not written yet"
        driver.coordinator.recovery.store.steps = lambda: [(2, Path("step_2")), (3, Path("step_3"))]
        await over(driver, task)

    asyncio.run(run())
    assert killed == [9]


def test_episodes_of_an_evaluation_do_not_count(driver):
    async def run():
        driver.coordinator.roles.runners.doing[0] = [activity(4)]
        driver.coordinator.state.unmeasured = 1
        task = await injecting(driver, "generator_stop_in_turn")
        task.cancel()

    asyncio.run(run())
    assert driver.injections.read() == []
