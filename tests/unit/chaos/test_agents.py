"""The agents of the runs fail once for each order, as ordered, and their episodes have the same tokens as without it.
No process of theirs is left. Only the policy is made up."""

import asyncio
import json
import os
from collections import Counter
from itertools import product

import numpy as np
import psutil
import pytest

from chaos import agents, environments, gateway_failures
from chaos.episode_runs import agent_sections, make_episode_files
from chaos.gateway_failures import FailingGateway
from chaos.injection_log import INJECTION_LOG, InjectionLog
from chaos.kinds.agents import leaks_problem
from chaos.witness.agents import agent_problems
from chaos.witness.episodes import EpisodeOrder
from chaos.witness.journals import JOURNALS, read_environments
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import WorkerBroken
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles.episode_journal import JournalPlace
from tests.unit.chaos.witness.test_episodes import Policy

ROWS = {"asker": (2, 8), "client": (1, 5), "program": (11,)}
"""Rows of each agent; of asker and client one with three or four turns."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_episode_files(tmp_path_factory.mktemp("files"))


class SlowPolicy(Policy):
    async def call(self, method, requests, *args, **named):
        await asyncio.sleep(0.05)
        return await super().call(method, requests, *args, **named)


@pytest.fixture
def injections(tmp_path, monkeypatch):
    log = InjectionLog(tmp_path / "injections.jsonl")
    monkeypatch.setenv(INJECTION_LOG, str(log.path))
    monkeypatch.setenv(JOURNALS, str(tmp_path / "journals"))
    return log


async def until(condition, seconds=15):
    for _ in range(seconds * 50):
        if condition():
            return
        await asyncio.sleep(0.02)


def play(files, name, during=None, then=None, journal=None):
    """The rollout of the episodes of an agent. `during` runs beside them, `then` after them."""
    rows = [json.loads(line) for line in files.agent_prompts.read_text().splitlines()]
    chosen = ROWS[name]
    texts = [rows[row].pop("prompt") for row in chosen]
    prompts = Prompts(np.arange(len(chosen) + 1), np.zeros(len(chosen), np.int32), texts,
                      [rows[row] for row in chosen], np.array(chosen))
    keys = [SampleKey(0, row, sample) for row in chosen for sample in range(2)]
    sections = agent_sections(files)

    async def run():
        given = sections["environments"][name]
        config = EnvironmentConfig(**{**given, "timeout_s": {"reset": 5, "step": 3, "episode": 50}})
        runner = FailingGateway({name: config}, ModelConfig(path=str(files.model)),
                                SamplingConfig(**sections["generator"]["sampling"]), SlowPolicy(files.stops),
                                least_scored=0)
        await runner.start()
        try:
            playing = asyncio.ensure_future(runner.play(prompts, keys, 5, journal=journal))
            if during is not None:
                await during()
            rollout = await playing
            if then is not None:
                await then()
            return rollout
        finally:
            await runner.stop()

    return asyncio.run(run())


def content(rollout):
    rows = [(rollout.row(i, "tokens").tolist(), rollout.row(i, "response_mask").tolist()) for i in range(len(rollout))]
    return rows, [(episode.cause, episode.use, sum(turn.reward for turn in episode.turns))
                  for episode in rollout.episodes]


_expected = {}


@pytest.fixture
def expected(files, monkeypatch, tmp_path_factory):
    """Without an order."""
    def of(name):
        if name not in _expected:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(JOURNALS, str(tmp_path_factory.mktemp("undisturbed")))
                patch.delenv(INJECTION_LOG, raising=False)
                _expected[name] = content(play(files, name))
        return _expected[name]

    return of


def leaks(directory):
    return [line for line in read_environments(directory / "journals") if line["event"] == agents.LEAKED]


def left_over(directory):
    """Processes that write to the journals of this test."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOURNALS) == str(directory) and process.pid != os.getpid():
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def witness(files, rollout, lines, name):
    order = EpisodeOrder.of(files.agent_prompts, 5, files.model, lines, agent_sections(files)["environments"])
    found = order.samples_in(Counter(tuple(rollout.row(i, "tokens").tolist()) for i in range(len(rollout))))
    assert found.whole == dict.fromkeys(ROWS[name], 2) and not found.again and not found.partial
    return list(agent_problems(lines, set(ROWS[name]), found.turns))


SLOW = (environments.STOP, environments.HANG, environments.HOLD, environments.HANG_IN_RESET, gateway_failures.STUCK)
"""They take until a deadline."""


def cases(pairs):
    """Slow ones are marked."""
    return [pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] in SLOW else []) for pair in pairs]


FAILURES = [
    ("asker", environments.KILL), ("asker", environments.KILL_IN_RESET), ("asker", environments.STOP),
    ("asker", environments.HANG), ("asker", environments.HOLD), ("asker", environments.HANG_IN_RESET),
    ("asker", agents.ENDLESS), ("asker", agents.CONNECTIONS), ("asker", agents.LARGE), ("asker", agents.HALF_OPEN),
    ("asker", agents.RESET_CONNECTION), ("asker", agents.LEAK_SESSION), ("asker", agents.LEAK_AFTER_RETURN),
    ("client", environments.KILL), ("client", agents.KILL_SERVER), ("client", agents.RESET_CONNECTION),
    ("program", environments.KILL), ("program", agents.KILL_HOST), ("program", environments.STOP),
    ("program", environments.HANG)]


@pytest.mark.parametrize("name, failure", cases(FAILURES))
def test_an_episode_has_the_same_tokens_although_its_agent_fails(files, injections, tmp_path, expected, name, failure,
                                                                 capfd):
    undisturbed = expected(name)
    environments.order_failure(injections.path, 4, failure, name)
    if failure == agents.LEAK_AFTER_RETURN:
        rollout = play(files, name, then=lambda: until(lambda: injections.read("recovered")))
    elif failure == agents.LEAK_SESSION:
        rollout = play(files, name, then=lambda: until(lambda: leaks_problem(leaks(tmp_path)) == ""))
    else:
        rollout = play(files, name)
    assert content(rollout) == undisturbed
    assert [(line["event"], line["fault"]) for line in injections.read()] == [("confirmed", 4), ("recovered", 4)]
    lines = read_environments(tmp_path / "journals")
    assert witness(files, rollout, lines, name) == []
    if failure in (agents.LEAK_SESSION, agents.LEAK_AFTER_RETURN):
        assert leaks_problem(leaks(tmp_path)) == ""
    assert not environments.order_file(injections.path).exists() and left_over(tmp_path / "journals") == []
    capfd.readouterr()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name, failure", cases([
    *product(["asker", "client"], (gateway_failures.LISTENER, gateway_failures.THREAD, gateway_failures.STUCK)),
    ("asker", gateway_failures.CONNECTIONS)]))
def test_episodes_have_the_same_tokens_although_their_gateway_fails(files, injections, tmp_path, expected, name,
                                                                    failure, capfd):
    """Where the gateway is of no use any more, its runner says so, and another one goes on. The stock client repeats a
    request whose answer may have been on its way when its connection was reset: that is another turn then."""
    undisturbed = expected(name)
    place = JournalPlace(str(tmp_path / "episodes"), 0, 0)
    (tmp_path / "episodes").mkdir()

    async def order():
        await until(lambda: any(line["event"] == "received" for line in read_environments(tmp_path / "journals")))
        gateway_failures.order_gateway_failure(injections.path, 4, failure, os.getpid())

    if failure == gateway_failures.CONNECTIONS:
        rollout = play(files, name, order, journal=place)
    else:
        with pytest.raises(WorkerBroken, match="out of reach"):
            play(files, name, order, journal=place)
        rollout = play(files, name, journal=place._replace(look=True))
    assert content(rollout) == undisturbed
    assert {episode.cause for episode in rollout.episodes} == {"completed"}
    lines = read_environments(tmp_path / "journals")
    assert witness(files, rollout, lines, name) == []
    assert [(line["event"], line["fault"]) for line in injections.read()][:1] == [("confirmed", 4)]
    assert left_over(tmp_path / "journals") == []
    capfd.readouterr()


REFUSED, ANSWERED = {"session": "a", "status": 410}, {"session": "a", "status": 200}


@pytest.mark.parametrize("answers, problem", [
    ([ANSWERED, REFUSED, REFUSED], ""),
    ([ANSWERED, {"session": "a", "status": 404}, {"session": "a", "status": 0}], ""),
    ([REFUSED, ANSWERED], "a request of a session that was closed was answered 200"),
    ([REFUSED, {"session": "b", "status": 200}], ""),
    ([ANSWERED], "no request of a session that was closed was made"),
    ([], "no request of a session that was closed was made"),
    ([REFUSED, {"session": "a", "status": 500}], "a request of a session that was closed was answered 500")])
def test_requests_of_a_closed_session_must_be_refused(answers, problem):
    assert leaks_problem([{**each, "time": i} for i, each in enumerate(answers)]) == problem
