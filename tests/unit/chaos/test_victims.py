"""Which call a fault meets; and a partitioned node continues after its worker was replaced: only one that was stopped
until then and has ended since counts as recovered.
"""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from chaos import victims
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.outcomes import outcomes
from chaos.victims import call_under_way, cut_off_until_replaced
from rlhf_ray.observability.spans import StepClock, Task

FAULT = Fault(1, "partition", 1)


class OneProcess:
    """A node of one process, which is stopped when the node is cut off."""

    def __init__(self, process, stays_cut_off=True):
        self._process, self._stays_cut_off = process, stays_cut_off

    def cut_off(self):
        self._process.suspend()
        return [self._process]

    def is_cut_off(self):
        if not self._stays_cut_off:
            self._process.resume()
        return self._process.status() == psutil.STATUS_STOPPED

    def reconnect(self):
        self._process.resume()


@pytest.fixture
def started(monkeypatch):
    """started(seconds) -> a process that ends after so long."""
    for name, seconds in {"HEARTBEAT_TIMEOUT_S": 0.3, "REPLACED_S": 1.0, "ENDED_S": 1.5, "EFFECT_S": 0.3}.items():
        monkeypatch.setattr(victims, name, seconds)
    made = []

    def make(seconds):
        code = f"import time; print(1, flush=True); [time.sleep(0.01) for _ in range({int(seconds * 100)})]"
        made.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE))
        made[-1].stdout.readline()
        return psutil.Process(made[-1].pid)

    yield make
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("seconds, replaced, back", [(0.1, True, True), (60, True, False), (0.1, False, False)])
def test_a_node_must_be_replaced_meanwhile_and_end_afterwards(tmp_path, started, seconds, replaced, back):
    injections, process = InjectionLog(tmp_path / "injections.jsonl"), started(seconds)
    cut_off_until_replaced(injections, FAULT, OneProcess(process), lambda: replaced)
    assert [line["event"] for line in injections.read()] == ["confirmed", *["recovered"] * back]
    assert not process.is_running() or process.status() != psutil.STATUS_STOPPED, "it goes on in any case"


def test_one_that_went_on_before_it_was_replaced_was_not_cut_off(tmp_path, started):
    injections, process = InjectionLog(tmp_path / "injections.jsonl"), started(0.1)
    cut_off_until_replaced(injections, FAULT, OneProcess(process, stays_cut_off=False), lambda: True)
    assert injections.read() == []


@pytest.mark.parametrize("back", [True, False])
def test_a_node_that_did_not_come_back_was_no_partition(fake_run, back):
    fake_run.start(100, 200, 0, 0)
    number = fake_run.injected("partition", 110, role="generator", pid=7)
    fake_run.event("generator", 7, 116, 12.0)
    if back:
        fake_run.line("recovered", 130, fault=number)
    (outcome,) = outcomes(fake_run.record)
    assert outcome.survived is back and (back or "was not cut off until its worker was replaced" in outcome.problem)


@pytest.mark.parametrize("seconds, calls", [(0.05, 6), (0.5, 1)])
def test_a_fault_whose_calls_are_faster_than_planned_meets_one_nevertheless(seconds, calls):
    """Planned: 0.2 s into a call. Calls of 0.05 s never reach that."""
    clock, made = StepClock(), []
    fault = Fault(1, "generator_stop", 1, rank=0, delay_s=0.2)
    group = SimpleNamespace(role="generator", processes=lambda _: SimpleNamespace(pid=os.getpid()))
    coordinator = SimpleNamespace(roles=SimpleNamespace(clock=clock, health=SimpleNamespace(down={})))

    async def run():
        async def call_again_and_again():
            while True:
                made.append(Task("generator", 0, "generate", clock.now()))
                with clock.waiting_for(made[-1]):
                    await asyncio.sleep(seconds)

        calling = asyncio.create_task(call_again_and_again())
        task, process = await asyncio.wait_for(call_under_way(fault, "generate", coordinator, group, lambda: False), 10)
        calling.cancel()
        return task is made[-1], len(made), process.pid

    assert asyncio.run(run()) == (True, calls, os.getpid())
