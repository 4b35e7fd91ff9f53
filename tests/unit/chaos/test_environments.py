"""The environments of the runs fail once for each order, as ordered, and their episodes have the same tokens as without
it. No process of theirs is left."""

import asyncio
import json
import os
from collections import Counter

import psutil
import pytest

from chaos import environments
from chaos.injection_log import INJECTION_LOG, InjectionLog
from chaos.witness.journals import JOURNALS, read_environments
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, ToolCall
from rlhf_ray.errors import EpisodeFailed, ReplayDiverged

ROW = {"prompt": "count", "number": 3, "turns": 4, "role": "user", "held_out": False}
REPLIES = ("one", "two", "three", "four")


@pytest.fixture
def injections(tmp_path, monkeypatch):
    log = InjectionLog(tmp_path / "injections.jsonl")
    monkeypatch.setenv(INJECTION_LOG, str(log.path))
    monkeypatch.setenv(JOURNALS, str(tmp_path / "journals"))
    return log


async def episode(pool, row, replies=REPLIES):
    """What the policy reads in an episode; a failed one is played again."""
    while True:
        environment = None
        try:
            environment = await pool.open(row, 7)
            read = [(environment.start.messages or [{"content": environment.observation}])[0]["content"]]
            for reply in replies:
                calls = [ToolCall("put", {"n": len(reply)})] if environment.start.tools else []
                step = await environment.step(Reply(reply, tool_calls=calls))
                read += [message["content"] for message in step.messages]
            return read
        except (EpisodeFailed, ReplayDiverged):
            continue
        finally:
            if environment is not None:
                await environment.close()


def played(name, number=1, order=None, **fields):
    """What some episodes at a time read in an environment, with one order."""
    async def play():
        pool = EnvironmentPool(name.lower(), EnvironmentConfig(
            path=f"{environments.__file__}:{name}", processes=1, memory_mib=400,
            timeout_s={"reset": 20, "step": 3}, **fields))
        await pool.start()
        try:
            return await asyncio.gather(*(episode(pool, ROW, (*REPLIES[:-1], f"{i}")) for i in range(number)))
        finally:
            await pool.stop()

    return asyncio.run(play())


def left_over(directory):
    """Processes that write to the journals of this test."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if process.environ().get(JOURNALS) == str(directory) and \
                "rlhf_ray.environments.host" in process.cmdline() else []
        except psutil.Error:
            continue
    return found


FAILURES = [environments.KILL, environments.KILL_IN_RESET, environments.FORK,
            *(pytest.param(each, marks=pytest.mark.slow) for each in (
                environments.HANG, environments.HOLD, environments.FLOOD, environments.LEAK))]


def test_an_episode_whose_replay_is_killed_begins_again_and_reads_the_same(injections, tmp_path):
    expected = played("Talk", 3)
    environments.order_failure(injections.path, 4, environments.KILL_TWICE)
    assert played("Talk", 3) == expected
    assert [line["event"] for line in injections.read()] == ["confirmed", "confirmed", "recovered"]
    assert left_over(tmp_path / "journals") == []


@pytest.mark.parametrize("name", ["Talk", "Counter"])
@pytest.mark.parametrize("failure", FAILURES)
def test_an_episode_reads_the_same_although_its_environment_fails(injections, tmp_path, name, failure, capfd):
    expected = played(name, 3)
    environments.order_failure(injections.path, 4, failure, name.lower())
    assert played(name, 3) == expected and len(set(map(str, expected))) == (3 if name == "Talk" else 1)
    assert [(line["event"], line["fault"]) for line in injections.read()] == [("confirmed", 4), ("recovered", 4)]
    assert not environments.order_file(injections.path).exists() and left_over(tmp_path / "journals") == []
    capfd.readouterr()


def test_what_was_answered_is_in_the_journal(injections, tmp_path):
    read = played("Talk")
    lines = read_environments(tmp_path / "journals")
    assert Counter(line["event"] for line in lines) == {"reset": 1, "answered": 4}
    assert [line["done"] for line in lines if line["event"] == "answered"] == [False, False, False, True]
    row, seed, turn, digest = lines[-1]["mark"]
    assert read[0][-1].endswith(f"[{row} {seed} {turn} {digest}]") and (row, turn) == (3, 4)


def test_orders_are_for_training_and_for_the_environment_that_they_name(injections):
    environments.order_failure(injections.path, 1, environments.KILL, "brief")
    played("Talk")
    environments.order_failure(injections.path, 1, environments.KILL)
    ROW["held_out"] = True
    try:
        played("Talk")
    finally:
        ROW["held_out"] = False
    assert injections.read() == [] and environments.order_file(injections.path).exists()


def test_a_restored_counter_is_where_it_was(injections):
    one, other = environments.Counter(), environments.Counter()
    one.reset(number=3, seed=7)
    one.put(4)
    other.restore(json.loads(json.dumps(one.snapshot())))
    assert other.put(5) == one.put(5) and other.get_reward() == one.get_reward()


def test_the_process_of_a_replayed_episode_is_killed_once_more(injections):
    """Without the replay: the place up to which it must not get is written down, and the next process heeds it."""
    killed = []
    talk = environments.Talk()
    talk.reset(ROW, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments.os, "kill", lambda pid, number: killed.append(number))
        patch.setitem(environments.FAILURES, environments.KILL_TWICE, lambda: killed.append("first"))
        talk.step(Reply("one"))
        environments.order_failure(injections.path, 2, environments.KILL_TWICE)
        talk.step(Reply("two"))
        stranger, again = environments.Talk(), environments.Talk()
        stranger.reset(ROW, 7)
        stranger.step(Reply("other"))
        assert killed == ["first"]
        again.reset(ROW, 7)
        again.step(Reply("one"))
        assert [line["event"] for line in injections.read()] == ["confirmed", "confirmed"], "not over yet"
        again.step(Reply("two"))
    assert killed == ["first", 9]
    assert [line["event"] for line in injections.read()] == ["confirmed", "confirmed", "recovered"]


def test_an_environment_that_pauses_goes_on_when_it_may(injections, monkeypatch):
    monkeypatch.setattr(environments, "PAUSE_S", 0.1)
    talk = environments.Talk()
    talk.reset(ROW, 7)
    talk.step(Reply("one"))
    environments.order_failure(injections.path, 2, environments.PAUSE)
    talk.step(Reply("two"))
    assert environments.paused_file(injections.path, 2).exists() and len(injections.read("confirmed")) == 1


def test_an_order_for_another_runner_is_left_alone(injections):
    environments.order_failure(injections.path, 1, environments.KILL, runner=1)
    played("Talk")
    assert injections.read() == [] and environments.order_file(injections.path).exists()


def test_an_order_for_this_runner_is_obeyed(injections):
    environments.order_failure(injections.path, 1, environments.KILL, runner=os.getpid())
    played("Talk")
    assert [line["event"] for line in injections.read()] == ["confirmed", "recovered"]
