"""The environments of docs/environments.md do what the page says. `tests/slow/test_pages.py` runs its commands."""

import asyncio
import os
import signal

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, ToolCall
from tests.pages import ROOT, write_files

PAGE = ROOT / "docs/environments.md"
ROW = {"prompt": "Buy tea.", "item": "tea", "price": 3}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with the files of the page."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(path, row, *replies):
    """Shape of an environment, its answers to these replies, and its reward."""
    async def run():
        pool = EnvironmentPool("page", EnvironmentConfig(path=path))
        try:
            facts = await pool.start()
            environment = await pool.open(row, seed=5)
            steps = [await environment.step(reply) for reply in replies]
            return facts.shape, steps, await environment.reward()
        finally:
            await pool.stop()

    return asyncio.run(run())


def call(name, **arguments):
    return Reply("a call", tool_calls=[ToolCall(name, arguments, "c")])


def test_a_function_is_a_tool_whose_errors_the_policy_reads(here):
    shape, steps, _ = play("tools.py:look_up", ROW, call("look_up", item="rice"), call("look_up", item="gold"),
                           Reply("five"))
    assert shape == "tools" and [step.tool_errors for step in steps] == [0, 1, 0]
    assert steps[0].messages[0]["content"] == "5" and "gold" in steps[1].messages[0]["content"]
    assert [step.done for step in steps] == [False, False, True], "a turn without a call ends the episode"


@pytest.mark.parametrize(("euros", "reward"), [(3, 1.0), (4, 0.0)])
def test_a_class_gives_its_reward_at_the_end(here, euros, reward):
    replies = [call("look_up", item="tea"), call("pay", euros=euros), Reply("done")]
    shape, steps, found = play("shop.py:Shop", ROW, *replies)
    assert (shape, steps[0].messages[0]["content"], found) == ("class", "3", reward)


def test_an_environment_in_messages_ends_when_it_says_so(here):
    shape, steps, _ = play("guess.py:Guess", {}, Reply("none"), Reply("0"))
    assert shape == "environment" and [step.info for step in steps] == [{"wrote_number": 0.0}, {"wrote_number": 1.0}]
    assert [step.messages[0]["content"] for step in steps] == ["Write a number.", "More."]


def test_an_environment_with_snapshots_goes_on_after_its_process_was_killed(here):
    async def run():
        pool = EnvironmentPool("page", EnvironmentConfig(path="kept_guess.py:KeptGuess"))
        try:
            facts = await pool.start()
            environment = await pool.open({}, seed=5)
            number = environment.snapshot["json"]["number"]
            wrong = [await environment.step(Reply("none"))]
            (process,) = [each for each in pool._hosts._processes if each.episodes]
            os.kill(process._process.pid, signal.SIGKILL)
            await process._process.ending()
            wrong.append(await environment.step(Reply("nothing")))
            return facts, wrong, await environment.step(Reply(f"Is it {number}?")), environment.interrupted
        finally:
            await pool.stop()

    facts, wrong, right, interrupted = asyncio.run(run())
    assert facts.restorable and not facts.replayable and interrupted == 1
    assert [step.messages[0]["content"] for step in wrong] == [
        "No. You have tried 1 times.", "No. You have tried 2 times."]
    assert right.done and right.reward == 1 / 3


def test_the_configurations_of_the_page_can_run(here):
    assert {name: list(load(PPOConfig, name, []).environments) for name in ("shop.yaml", "tasks.yaml")} == {
        "shop.yaml": ["shop"], "tasks.yaml": ["shop", "guess"]}
