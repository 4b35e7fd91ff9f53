"""When the injector delays the training loop."""

import asyncio
from types import SimpleNamespace

import pytest

from chaos.driver_under_test import LEARNER_RESTART, RESUME
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.injector import Injector
from chaos.kinds import KINDS


def coordinator(step, *down, told=False):
    """One after so many updates, with workers that are down."""
    lost = {worker: SimpleNamespace(recorded=told) for worker in down}
    return SimpleNamespace(state=SimpleNamespace(step=step), roles=SimpleNamespace(health=SimpleNamespace(down=lost)))


@pytest.fixture
def injector(tmp_path):
    """Of one fault."""
    return Injector([Fault(1, "generator_kill", step=5, rank=1)], InjectionLog(tmp_path / "injections.jsonl"))


@pytest.mark.parametrize("step, down, waits", [
    (5, [("generator", 1)], True), (4, [("generator", 1)], False), (5, [("generator", 0)], False), (5, [], False)])
def test_training_waits_while_the_victim_of_a_fault_that_is_due_is_down(injector, step, down, waits):
    assert injector.must_wait(coordinator(step, *down)) is waits


def test_it_waits_for_nobody_who_cannot_come_back(injector):
    assert not injector.must_wait(coordinator(5, ("generator", 1), told=True))
    injector.driver.learners_lost = True  # generators get their weights from them
    assert not injector.must_wait(coordinator(5, ("generator", 1)))


def test_when_no_fault_is_left_it_waits_for_all_who_are_down(injector):
    injector.driver.left.clear()
    assert injector.must_wait(coordinator(2, ("reward_scorer", 0))) and not injector.must_wait(coordinator(2))


def test_a_run_without_faults_goes_as_ever(tmp_path):
    injector = Injector([Fault(1, "request_lost", step=1)], InjectionLog(tmp_path / "injections.jsonl"))
    assert not injector.must_wait(coordinator(2, ("generator", 1)))


@pytest.mark.parametrize("step, down, due", [
    (5, [], False), (5, [("reward_scorer", 0)], True), (6, [("reward_scorer", 0)], True), (7, [], True)])
def test_a_fault_during_a_repair_waits_for_it_but_not_for_ever(tmp_path, step, down, due):
    injector = Injector([Fault(1, "generator_kill", step=5, during_repair=True)], InjectionLog(tmp_path / "i.jsonl"))
    injector.driver.coordinator = coordinator(step, *down)
    assert injector.is_due(injector.driver.left[0]) is due


@pytest.mark.parametrize(("kind", "due"), [("output_lost", False), ("disk_slow", False), ("generator_kill", True)])
def test_what_lasts_waits_for_the_loop_after_a_lost_learner(tmp_path, kind, due):
    injector = Injector([Fault(1, kind, step=5)], InjectionLog(tmp_path / "i.jsonl"))
    injector.driver.coordinator = coordinator(5)
    injector.driver.learners_lost = True
    assert injector.is_due(injector.driver.left[0]) is due
    injector.driver.coordinator = coordinator(5)  # of the next loop
    assert injector.is_due(injector.driver.left[0])


def test_what_was_under_repair_is_logged_and_a_fault_is_injected_once(tmp_path):
    injector = Injector([Fault(1, "generator_kill", step=5)], InjectionLog(tmp_path / "i.jsonl"))
    driver = injector.driver
    driver.coordinator = coordinator(5, ("reward_scorer", 0))
    driver.injected(driver.left[0], state="at work")
    (line,) = driver.injections.read("injected")
    assert line["repairing"] == ["reward_scorer/0"] and driver.left == []


@pytest.mark.parametrize(("began", "reached"), [(2, 5), (8, 9), (9, 9)], ids=["after three", "before the last", "last"])
def test_training_waits_for_what_lasts_after_three_updates_and_before_the_last(injector, began, reached):
    driver = injector.driver
    driver.coordinator = running = coordinator(began)
    running.config = SimpleNamespace(run=SimpleNamespace(steps=10))

    async def updates():
        over = asyncio.Event()
        waiting = asyncio.create_task(driver.hold_until(over.wait()))
        for _ in range(20):
            await asyncio.sleep(0.01)
            running.state.step += not injector.must_wait(running)
        over.set()
        await waiting

    asyncio.run(updates())
    assert running.state.step == reached and not injector.must_wait(running)


def test_a_fault_of_another_moment_is_injected_only_then(tmp_path, monkeypatch):
    """While learners are restarted, which does not end before the fault is injected."""
    kind, injected = KINDS["policy_kill_in_restart"], []

    async def inject(self, driver, fault):
        await asyncio.sleep(0.01)
        injected.append(driver.moment)

    monkeypatch.setattr(type(kind), "inject", inject)
    injector = Injector([Fault(1, kind.name, step=5)], InjectionLog(tmp_path / "i.jsonl"))

    async def meanwhile(moment):
        async with injector.at(moment):
            pass

    for moment in ("", RESUME, LEARNER_RESTART):
        asyncio.run(meanwhile(moment))
    assert injected == [LEARNER_RESTART] and injector.driver.moment == ""


@pytest.mark.parametrize("down, waits", [([("generator", 1)], True), ([], False)])
def test_training_waits_for_a_fault_inside_the_repair_that_is_under_way(tmp_path, down, waits):
    """Otherwise all its updates may be over before the catch-up begins."""
    injector = Injector([Fault(1, "generator_kill_in_catch_up", step=5)], InjectionLog(tmp_path / "i.jsonl"))
    assert injector.must_wait(coordinator(5, *down)) is waits
