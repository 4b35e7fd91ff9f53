"""Servers of OpenEnv as environments, by a server that answers what a real one did (`tests/openenv_wire.py`; a real
one is started by `tests/slow/test_openenv_server.py`)."""

import asyncio
import functools
import json
import os
from contextlib import asynccontextmanager

import pytest

from rlhf_ray.config.environment_sources import OpenEnvSource
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, Start, ToolCall
from rlhf_ray.errors import ConfigError, EpisodeFailed
from tests.openenv_wire import FRAMES, Replayed
from tests.unit.environments.conftest import content, until

GUESS = {"prompt": "Play.", "highest": 5}
SHOP = {"prompt": "Play.", "item": "rice"}


def in_loop(test):
    """A test that is a coroutine."""
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))
    return run


@asynccontextmanager
async def pool_at(url, *, config=None, **openenv):
    pool = EnvironmentPool("served", EnvironmentConfig(openenv={"url": url, **openenv}, **(config or {})))
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()


def say(text):
    return Reply(f"<think>hm</think>{text}", content=text, reasoning="hm")


def calls(*given):
    return Reply("", tool_calls=[ToolCall(name, arguments, str(i)) for i, (name, arguments) in enumerate(given)])


@in_loop
async def test_a_reply_is_the_text_of_an_action_and_the_observation_is_read():
    server = Replayed("guess")
    with server.running() as url:
        async with pool_at(url) as pool:
            assert (await pool.start()).replayable
            environment = await pool.open(GUESS, seed=3)
            assert environment.start == Start() and environment.observation == "\n\nGuess a number from 1 to 5."
            steps = [await environment.step(say(text)) for text in ("I guess.", "5", "2")]
            await environment.close()
    assert [content(step) for step in steps] == ["Write a number.", "Less.", "Right."]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (1.0, True)]
    assert server.unknown == [] and server.open == 0


@in_loop
async def test_a_reply_may_be_the_action_as_json_and_what_is_wrong_is_read():
    server = Replayed("guess")
    with server.running() as url:
        async with pool_at(url, action="json") as pool:
            environment = await pool.open(GUESS, seed=3)
            steps = [await environment.step(say(text)) for text in (
                "5", "[2]", '{"messages": "2"}', '```json\n{"message": "2"}\n```')]
            await environment.close()
    assert [step.tool_errors for step in steps] == [1, 1, 1, 0] and steps[3].done and steps[3].reward == 1.0
    assert all("must be one JSON object" in content(step) for step in steps[:2])
    assert "message: Field required; messages: Extra inputs are not permitted" in content(steps[2])
    assert server.unknown == []


@in_loop
async def test_actions_of_several_fields_are_json_unless_the_field_is_named():
    server = Replayed("guess")
    server.schema = {"action": {"properties": {"message": {}, "weight": {}}, "required": ["message", "weight"]}}
    with server.running() as url:
        for settings, text in (({}, '{"message": "5"}'), ({"field": "message"}, "5")):
            async with pool_at(url, **settings) as pool:
                environment = await pool.open(GUESS, seed=3)
                assert content(await environment.step(say(text))) == "Less."


@in_loop
async def test_tools_that_the_server_lists_are_the_policys():
    server = Replayed("shop")
    with server.running() as url:
        async with pool_at(url) as pool:
            environment = await pool.open(SHOP, seed=3)
            assert [tool["function"]["name"] for tool in environment.start.tools] == ["look_up", "buy"]
            assert environment.start.tools[1]["function"]["parameters"] == {
                "type": "object", "required": ["item"],
                "properties": {"item": {"type": "string"}, "count": {"type": "integer", "default": 1}}}
            assert environment.observation == "\n\nBuy rice."
            first = await environment.step(calls(("look_up", {"item": "rice"}), ("look_up", {"item": "gold"}),
                                                 ("look_up", {}), ("nope", {})))
            second = await environment.step(calls(("buy", {"item": "rice"}), ("buy", {"item": "tea", "count": 2})))
    read = [message["content"] for message in first.messages]
    assert read[0] == "5" and all(text.startswith("Error: ") for text in read[1:]) and first.tool_errors == 3
    assert [message["tool_call_id"] for message in first.messages] == ["0", "1", "2", "3"] and not first.done
    assert second.done and second.reward == 1.0 and len(second.messages) == 1, "no call follows the end"
    assert server.unknown == []


@in_loop
async def test_a_turn_without_a_call_ends_an_episode_with_tools():
    with Replayed("shop").running() as url:
        async with pool_at(url) as pool:
            step = await (await pool.open(SHOP, seed=3)).step(say("No."))
    assert step.done and step.reward == 0.0 and not step.messages


@in_loop
async def test_only_named_columns_and_fields_are_sent_and_read():
    server = Replayed("guess")
    with server.running() as url:
        async with pool_at(url, columns=["prompt", "highest"], observation="hint", field="message") as pool:
            environment = await pool.open({**GUESS, "answer": 2}, seed=3)
            assert content(await environment.step(say("5"))) == "Less."
            with pytest.raises(EpisodeFailed, match="no column 'highest', which openenv.columns names"):
                await pool.open({"prompt": "Play."}, seed=3)
        async with pool_at(url, observation="nope") as pool:
            with pytest.raises(EpisodeFailed, match=r"no field 'nope' \(openenv.observation\); its fields are hint"):
                await pool.open(GUESS, seed=3)
    assert server.unknown == []


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("guess", {"action": "tools"}, "action is tools, and the server lists none"),
    ("guess", {"field": "nope"}, "field=nope is no field of the server's actions, which have metadata, message"),
    ("two fields", {"action": "text"}, "not one field that is required, a text, but message, weight"),
])
def test_an_action_that_the_server_does_not_take_is_refused(name, settings, words):
    async def run():
        server = Replayed("guess")
        if name == "two fields":
            server.schema = {"action": {"properties": {}, "required": ["message", "weight"]}}
        with server.running() as url:
            async with pool_at(url, **settings) as pool:
                await pool.open(GUESS, seed=3)

    with pytest.raises(EpisodeFailed, match=words):
        asyncio.run(run())


@in_loop
async def test_every_episode_frees_its_session_however_it_ends():
    """A server with two sessions: a failed reset, an episode that is dropped, one that is cancelled, and a killed
    process leave none of them in use."""
    server = Replayed("guess", sessions=2)
    with server.running() as url:
        async with pool_at(url, connect_s=20) as pool:
            for _ in range(3):
                with pytest.raises(EpisodeFailed, match="can only concatenate str"):
                    await pool.open({**GUESS, "highest": "a"}, seed=3)
            dropped = await pool.open(GUESS, seed=3)
            del dropped
            await until(lambda: server.open == 0)
            left = [await pool.open(GUESS, seed=3) for _ in range(2)]
            third = asyncio.create_task(pool.open(GUESS, seed=3))
            await asyncio.sleep(0.5)
            assert server.open == 2 and not third.done(), "it waits for a session"
            await left[0].close()
            environment = await third
            for process in list(pool._hosts._processes):
                os.kill(process._process.pid, 9)
            await until(lambda: server.open == 0)
            step = await environment.step(say("2"))  # brought back in another process
            assert step.reward == 1.0 and environment.interrupted == 1
        await until(lambda: server.open == 0)
    assert server.most == 2 and server.unknown == []


@in_loop
async def test_a_server_whose_sessions_stay_in_use_is_named():
    with Replayed("guess", sessions=1).running() as url:
        async with pool_at(url, connect_s=0.5) as pool:
            kept = await pool.open(GUESS, seed=3)
            with pytest.raises(EpisodeFailed, match="all sessions of the server were in use for 0.5 s: .* 2/2"):
                await pool.open(GUESS, seed=3)
            await kept.close()


@in_loop
async def test_a_lost_connection_is_the_environments_failure():
    server = Replayed("guess")
    with server.running() as url:
        async with pool_at(url) as pool:
            environment = await pool.open(GUESS, seed=3)
            server.leave.set()
            with pytest.raises(EpisodeFailed, match="closed the connection during step") as failed:
                await environment.step(say("5"))
        assert failed.value.cause == "error_environment"
    async with pool_at(url) as pool:
        with pytest.raises(EpisodeFailed, match=f"there is no OpenEnv server at {url}"):
            await pool.open(GUESS, seed=3)


@in_loop
async def test_a_server_may_be_said_not_to_be_replayable():
    with Replayed("guess").running() as url:
        async with pool_at(url, replayable=False) as pool:
            assert not (await pool.start()).replayable


@in_loop
async def test_a_token_that_is_not_there_is_named():
    with Replayed("guess").running() as url:
        async with pool_at(url, token_variable="NO_SUCH_TOKEN") as pool:
            with pytest.raises(EpisodeFailed, match="variable NO_SUCH_TOKEN .token_variable. is not set"):
                await pool.open(GUESS, seed=3)


@in_loop
async def test_the_token_is_sent(monkeypatch):
    monkeypatch.setenv("TOKEN_OF_SERVER", "s3cret")
    server = Replayed("guess")
    with server.running() as url:
        async with pool_at(url, token_variable="TOKEN_OF_SERVER") as pool:
            await pool.open(GUESS, seed=3)
    assert len(server.headers) == 2, "the connection, and the schema"
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret"}


def test_the_committed_answers_are_whole():
    recorded = json.loads(FRAMES.read_text())
    assert recorded["openenv"] == "openenv==0.10.0" and recorded["refusal"]["data"]["code"] == "CAPACITY_REACHED"
    assert recorded["refusal"]["data"]["max_sessions"] == 2


@pytest.mark.parametrize(("given", "words"), [
    ({}, "url: is required"), ({"url": "ws://h"}, "not of the form http"),
    ({"url": "http://h", "action": "json", "field": "message"}, "field is that of a text, and action=json has none"),
    ({"url": "http://h:x"}, "cannot be read"),
])
def test_settings_that_cannot_be_meant_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        OpenEnvSource(**given)
