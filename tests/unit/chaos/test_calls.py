"""A call that is made twice, and a reply that is handed out only when its worker has been given up."""

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import psutil
import pytest

from chaos.driver_under_test import DriverUnderTest
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.kinds import KINDS
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.calls import Fence


@dataclass(frozen=True)
class MadeCall:
    """A call whose worker answers at once."""

    rank: int
    method: str
    timing: object
    fence: Fence = field(default_factory=Fence)

    async def done(self):
        return await self.timing


class Group:
    """A group of two workers that counts its calls."""

    role, ranks = "", [0, 1]

    def __init__(self, role, pid):
        self.role, self._pid, self.made = role, pid, []

    def call(self, rank, method, *_, **__):
        timing = asyncio.get_running_loop().create_future()
        timing.set_result(0.5)
        self.made.append(MadeCall(rank, method.__name__, timing))
        return self.made[-1]

    def processes(self, _):
        return SimpleNamespace(pid=self._pid)

    def incarnation(self, _):
        return 1


def driver_of(tmp_path, group):
    driver = DriverUnderTest([], InjectionLog(tmp_path / "injections.jsonl"))
    health = SimpleNamespace(down={})
    driver.coordinator = SimpleNamespace(
        state=SimpleNamespace(step=3), roles=SimpleNamespace(all_groups=lambda: [group], health=health))
    return driver


@pytest.mark.parametrize("kind, repeated", [("generate_twice", [1]), ("update_twice", [0, 1])])
def test_the_next_call_is_made_twice_and_only_that(tmp_path, kind, repeated):
    fault = Fault(1, kind, 1, rank=1)
    group = Group(KINDS[kind].role, os.getpid())
    driver = driver_of(tmp_path, group)
    driver.left = [fault]

    async def run():
        injecting = asyncio.create_task(KINDS[kind].inject(driver, fault))
        await asyncio.sleep(0)
        for method in ("other", KINDS[kind].method, KINDS[kind].method):
            for rank in (0, 1):
                group.call(rank, SimpleNamespace(__name__=method))
        await asyncio.sleep(0.05)
        driver.coordinator.state.step += 1
        await injecting

    asyncio.run(run())
    method = KINDS[kind].method
    assert [sum((call.rank, call.method) == (rank, method) for call in group.made) - 2 for rank in (0, 1)] == [
        rank in repeated for rank in (0, 1)]
    assert [line["event"] for line in driver.injections.read()] == ["injected", "confirmed", "recovered"]


def test_a_reply_is_held_back_until_its_worker_was_given_up(tmp_path):
    fault = Fault(1, "reply_late", 1)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    group = Group("reference_scorer", child.pid)
    driver = driver_of(tmp_path, group)
    driver.left = [fault]

    async def run():
        injecting = asyncio.create_task(KINDS["reply_late"].inject(driver, fault))
        await asyncio.sleep(0)
        reply = asyncio.create_task(group.call(0, PolicyLearner.logprobs).done())
        await asyncio.sleep(0.05)
        assert not reply.done() and psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
        group.made[0].fence.close("it gave no sign of life")
        await injecting
        return await reply

    try:
        assert asyncio.run(run()) == 0.5
    finally:
        child.kill()
        child.wait()
    assert [line["event"] for line in driver.injections.read()] == ["injected", "confirmed"]
