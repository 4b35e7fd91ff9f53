"""What counts as survived for faults in episodes of agents, by the files of a stand-in for a run."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from chaos import agents, environments, gateway_failures
from chaos.campaign import RUNS, trials
from chaos.driver_under_test import DriverUnderTest
from chaos.faults import Fault
from chaos.injection_log import InjectionLog
from chaos.kinds import KINDS
from chaos.kinds import agents as kinds_of_agents
from chaos.outcomes import outcomes, to_inject_again
from chaos.witness.journals import ENVIRONMENT
from chaos.witness.markers import Mark
from tests.unit.chaos.episode_outcomes import problems, row

MINE = {kind.name: kind for kind in kinds_of_agents.KINDS}


@pytest.fixture
def run(fake_run):
    fake_run.start(0, 100, 0, 0)
    fake_run.record.config.write_text("coordinator: {max_staleness: 0}")
    return fake_run


def journal(run, *lines):
    run.record.journals.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"time": i, **line}) + "\n" for i, line in enumerate(lines))
    (run.record.journals / f"{ENVIRONMENT}_7.jsonl").write_text(text)


def test_every_kind_of_agents_is_in_a_run_of_agents_and_distinct():
    assert all(RUNS[name].episodes is not None and name == "agents" for kind in MINE.values() for name in kind.runs)
    assert len({kind.triple for kind in MINE.values()}) == len(MINE) >= 20
    (trial,) = trials(1, 1, list(MINE))
    assert set(trial.kinds) <= set(MINE) and trial.reproducible


@pytest.mark.parametrize("name", [name for name, kind in MINE.items() if isinstance(
    kind, kinds_of_agents.AgentFailure) and kind.events and not isinstance(kind, kinds_of_agents.LeakedSession)])
def test_an_agent_that_failed_must_have_come_to_the_same_place_and_be_counted(run, name):
    number = run.injected(name, 10, step=2)
    row(run, 2, retries=1)
    assert problems(run) == ["no answer of the same turn afterwards"]
    run.line("recovered", 12, fault=number)
    assert problems(run)[0].startswith("no update counts any retries")
    row(run, 4, interrupted=0.125)
    assert problems(run) == [""]


@pytest.mark.parametrize("name", ["agent_connections", "agent_large", "agent_half_open", "agent_reset"])
def test_an_agent_that_goes_on_needs_no_retry(run, name):
    number = run.injected(name, 10, step=2)
    assert problems(run) == ["no answer of the same turn afterwards"]
    run.line("recovered", 12, fault=number)
    assert problems(run) == [""]


@pytest.mark.parametrize("name", ["agent_leak", "agent_leak_after_return"])
def test_what_an_agent_left_behind_must_have_been_refused(run, name):
    run.line("recovered", 12, fault=run.injected(name, 10, step=2))
    row(run, 3, retries=1)
    leaked = {"event": agents.LEAKED, "session": "a"}
    journal(run, {**leaked, "status": 200})
    assert problems(run) == ["no request of a session that was closed was made"]
    journal(run, {**leaked, "status": 410}, {**leaked, "status": 200})
    assert problems(run) == ["a request of a session that was closed was answered 200"]
    journal(run, {**leaked, "status": 200}, {**leaked, "status": 410}, {**leaked, "status": 404})
    assert problems(run) == [""]


@pytest.mark.parametrize("failure", gateway_failures.FAILURES)
def test_a_gateway_that_failed_must_be_followed_by_a_session_that_is_answered(run, failure):
    number = run.injected(f"gateway_{failure}", 10, role="episode_runner", rank=0, pid=5, step=2)
    assert problems(run) == ["no session of the same runner, or of its successor, was answered afterwards"]
    run.line("recovered", 14, fault=number)
    assert problems(run) == [""] and outcomes(run.record)[0].recovery_s == 4


def test_a_gateway_whose_driver_ends_first_fails_again(fake_run):
    fake_run.start(0, 20, -9, -9)
    number = fake_run.injected("gateway_thread", 10, step=2)
    assert to_inject_again(fake_run.record) == {number}


@pytest.fixture
def driver(tmp_path):
    children = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    found = DriverUnderTest([], InjectionLog(tmp_path / "injections.jsonl"))
    runners = SimpleNamespace(role="episode_runner", processes=lambda rank: SimpleNamespace(pid=children[rank].pid))
    found.coordinator = SimpleNamespace(state=SimpleNamespace(step=3), roles=SimpleNamespace(
        runners=runners, all_groups=lambda: [runners], health=SimpleNamespace(down={})))
    yield found, [child.pid for child in children]
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_gateway_of_the_runner_fails_while_an_agent_of_it_pauses(driver, rank):
    driver, pids = driver
    fault = Fault(1, "gateway_listener", 1, rank=rank)
    driver.left = [fault]
    place = driver.injections.path

    async def inject():
        task = asyncio.create_task(KINDS["gateway_listener"].inject(driver, fault))
        while not environments.order_file(place).exists():
            await asyncio.sleep(0.01)
        assert json.loads(environments.order_file(place).read_text())["runner"] == pids[rank]
        assert not gateway_failures.gateway_order_file(place).exists()
        environments.paused_file(place, 1).write_text("{}")
        while not (order := gateway_failures.gateway_order_file(place)).exists():
            await asyncio.sleep(0.01)
        assert json.loads(order.read_text()) == {"fault": 1, "failure": "listener", "runner": pids[rank]}
        assert environments.paused_file(place, 1).exists()
        order.unlink()
        await asyncio.wait_for(task, 5)
        assert not environments.paused_file(place, 1).exists()

    asyncio.run(inject())
    (line,) = driver.injections.read("injected")
    assert (line["rank"], line["pid"]) == (rank, pids[rank])


class Recovering(agents.AgentPlayed):
    """A place in an attempt at an episode of this process's runner."""

    def __init__(self, turn, begun=0.0, session="mine"):
        self.mark = Mark(3, "abcdef", turn, "0" * 6)
        self.begun, self.name = begun, session


@pytest.mark.parametrize("turn, begun, runner, shows", [
    (1, 11.0, "mine", True), (0, 11.0, "mine", False), (1, 9.0, "mine", False), (1, 11.0, "gone", True),
    (1, 11.0, "another", False)])
def test_a_gateway_is_there_again_when_a_later_session_of_it_is_answered(monkeypatch, turn, begun, runner, shows):
    monkeypatch.setattr(environments, "_runner", lambda: 77)
    failed = {"mine": 77, "gone": 2**22 + 5, "another": os.getpid()}[runner]
    given = {"gateway_of": failed, "time": 10.0}
    assert Recovering(turn, begun)._shows_recovery(given) is shows


@pytest.mark.parametrize("failure, turn, session, shows", [
    (agents.KILL_SERVER, 2, "mine", False), (agents.KILL_SERVER, 2, "next", True),
    (agents.KILL_SERVER, 1, "next", False),
    (environments.KILL, 2, "mine", False), (environments.KILL, 2, "next", True),
    (agents.LARGE, 2, "mine", False), (agents.LARGE, 3, "mine", True), (agents.LARGE, 3, "next", False)])
def test_an_agent_has_recovered_in_its_next_attempt_or_in_its_next_turn_if_it_goes_on(failure, turn, session, shows):
    given = Recovering(1)._unrecovered(failure, Mark(3, "abcdef", 2, "0" * 6))
    assert Recovering(turn, session=session)._shows_recovery(given) is shows
