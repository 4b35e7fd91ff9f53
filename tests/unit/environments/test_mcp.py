"""Servers of the Model Context Protocol as environments: real servers by the server classes of the package `mcp`, and
its stock client as the oracle of what a tool answers."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

from rlhf_ray.config.environment_sources import McpSource
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, ToolCall
from rlhf_ray.errors import ConfigError, EnvironmentFailed, EpisodeFailed

SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = [sys.executable, SERVER]


def in_loop(test):
    """A test that is a coroutine."""
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))
    return run


@contextlib.asynccontextmanager
async def pool_of(*, config=None, **mcp):
    pool = EnvironmentPool("served", EnvironmentConfig(mcp=mcp or {"command": COMMAND}, **(config or {})))
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()


async def call(environment, name, **arguments):
    """(what the policy reads, tool errors)."""
    step = await environment.step(Reply("", tool_calls=[ToolCall(name, arguments, "id")]))
    (message,) = step.messages
    assert (message["role"], message["name"], message["tool_call_id"]) == ("tool", name, "id") and not step.done
    return message["content"], step.tool_errors


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def until_gone(pid):
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "the server is left"
        await asyncio.sleep(0.02)


@in_loop
async def test_the_policy_reads_what_the_stock_client_gets():
    calls = [("add", {"a": 2}), ("add", {"a": 2, "b": -5}), ("count", {}), ("count", {}), ("two_texts", {}),
             ("visit", {"place": {"street": "Ö", "number": 3}}), ("fails", {"message": "not\nso"}), ("refuses", {}),
             ("add", {"b": 2}), ("resource", {}), ("nothing_but_structure", {}), ("picture", {})]
    read = []
    async with Client(StdioServerParameters(command=COMMAND[0], args=COMMAND[1:])) as client:
        for name, arguments in calls:
            result = await client.call_tool(name, arguments)
            read.append(([part.model_dump() for part in result.content], result.is_error, result.structured_content))
    async with pool_of() as pool:
        environment = await pool.open({}, seed=1)
        ours = [await call(environment, name, **arguments) for name, arguments in calls]
        await environment.close()
    for (content, is_error, _), (text, errors) in zip(read[:9], ours[:9], strict=True):
        assert text == "\n".join(part["text"] for part in content) and errors == is_error
    assert [errors for _, errors in ours] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert ours[2:4] == [("1", 0), ("2", 0)] and ours[4][0] == "one\nzwei €" and ours[7][0] == "no\nmore"
    assert ours[9][0] == read[9][0][0]["resource"]["text"] == "of a file"
    assert json.loads(ours[10][0]) == read[10][2] == {"ü": [1, None]}, "structured content in place of missing texts"
    assert ours[11][0] == "see\n[image/png]" and len(read[11][0][1]["data"]) > 5000, "no picture as text"


@in_loop
async def test_the_schemas_are_the_servers():
    async with pool_of() as pool:
        facts = await pool.start()
    schemas = {tool["function"]["name"]: tool["function"] for tool in facts.tools}
    async with Client(StdioServerParameters(command=COMMAND[0], args=COMMAND[1:])) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert schemas.keys() == listed.keys() and facts.shape == "class"
    assert schemas["add"] == {
        "name": "add", "description": "Adds.", "parameters": {
            "type": "object", "required": ["a"],
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}}}}
    assert "$ref" in json.dumps(listed["visit"].input_schema), "which templates do not follow"
    assert schemas["visit"]["parameters"]["properties"] == {
        "place": {"type": "object", "required": ["street"], "properties": {
            "street": {"type": "string"}, "number": {"type": "integer", "nullable": True}}},
        "note": {"type": "string", "nullable": True}}


@in_loop
async def test_each_episode_has_a_server_that_ends_with_it():
    async with pool_of() as pool:
        facts = await pool.start()
        assert not facts.replayable, "only whoever knows the server can say so"
        first, second = await pool.open({}, seed=1), await pool.open({}, seed=1)
        assert [(await call(each, "count"))[0] for each in (first, first, second)] == ["1", "2", "1"]
        pids = [int((await call(each, "pid"))[0]) for each in (first, second)]
        assert len(set(pids)) == 2
        await first.close()
        assert not alive(pids[0]) and (await call(second, "count"))[0] == "2"
    await until_gone(pids[1])


@in_loop
async def test_whoever_knows_a_server_may_say_that_it_is_replayable():
    async with pool_of(command=COMMAND, replayable=True) as pool:
        assert (await pool.start()).replayable
        environment = await pool.open({}, seed=1)
        assert await call(environment, "count") == ("1", 0)
        (process,) = [each for each in pool._hosts._processes if each.episodes]
        os.kill(process._process.pid, signal.SIGKILL)
        await process._process.ending()
        assert await call(environment, "count") == ("2", 0), "the call before was repeated to another server"
        assert environment.interrupted == 1


@in_loop
async def test_a_server_ends_with_the_environments_process():
    async with pool_of() as pool:
        environment = await pool.open({}, seed=1)
        pid = int((await call(environment, "pid"))[0])
        (process,) = [each for each in pool._hosts._processes if each.episodes]
        os.kill(process._process.pid, signal.SIGKILL)
        await until_gone(pid)


@in_loop
async def test_a_server_that_ends_is_the_environments_failure_and_no_answer():
    async with pool_of() as pool:
        environment, neighbour = await pool.open({}, seed=1), await pool.open({}, seed=1)
        with pytest.raises(EpisodeFailed, match="ended its connection while its tool 'ends' ran") as failed:
            await call(environment, "ends")
        assert failed.value.cause == "error_environment"
        assert (await call(neighbour, "count"))[0] == "1"


@in_loop
async def test_a_slow_tool_is_an_answer_and_the_server_goes_on():
    async with pool_of(command=COMMAND, timeout_s=0.5) as pool:
        environment = await pool.open({}, seed=1)
        await call(environment, "count")
        assert await call(environment, "sleeps", seconds=1.0) == (
            "Error: sleeps: it gave no answer within 0.5 s", 1)
        await asyncio.sleep(0.7)
        assert await call(environment, "count") == ("2", 0)


@in_loop
async def test_tools_of_the_row_begin_and_judge_an_episode():
    mcp = {"command": COMMAND, "reset_tool": "begin", "reward_tool": "score"}
    async with pool_of(**mcp) as pool:
        facts = await pool.start()
        names = [tool["function"]["name"] for tool in facts.tools]
        assert "begin" not in names and "score" not in names and "add" in names
        environment = await pool.open({"task": "cook", "other": [1]}, seed=7)
        assert environment.observation == "\n\nBegun: cook 7."
        assert (await environment.step(Reply("no call"))).done and await environment.reward() == 0.25
        with pytest.raises(EpisodeFailed, match="'begin' failed: .*cannot be begun"):
            await pool.open({"task": "impossible"}, seed=7)


@in_loop
async def test_a_reward_that_is_no_number_fails():
    async with pool_of(command=COMMAND, reward_tool="two_texts") as pool:
        environment = await pool.open({}, seed=1)
        await environment.step(Reply("no call"))
        with pytest.raises(EpisodeFailed, match="which is no reward"):
            await environment.reward()


@in_loop
async def test_only_named_tools_are_the_policys():
    async with pool_of(command=COMMAND, tools=["count"]) as pool:
        assert [tool["function"]["name"] for tool in (await pool.start()).tools] == ["count"]
        environment = await pool.open({}, seed=1)
        assert await call(environment, "pid") == ("Error: there is no tool 'pid'; the tools are count", 1)


@in_loop
async def test_variables_are_those_that_are_named(monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    async with pool_of(command=COMMAND, variables={"MINE": "1"}) as pool:
        environment = await pool.open({}, seed=1)
        names = (await call(environment, "variables"))[0].split()
        assert "MINE" in names and "PATH" in names and "A_SECRET" not in names


@pytest.mark.parametrize(("mcp", "words"), [
    ({"command": ["no-such-program"]}, "there is no MCP server at .*no-such-program"),
    ({"command": [sys.executable, "-c", "print('hello')"]}, "there is no MCP server at"),
    ({"command": COMMAND, "tools": ["nope"]}, "no tool 'nope'; its tools are add, count"),
    ({"command": COMMAND, "reward_tool": "nope"}, "no tool 'nope'"),
    ({"url": "http://127.0.0.1:9/mcp"}, "there is no MCP server at http://127.0.0.1:9/mcp"),
])
@in_loop
async def test_a_server_that_cannot_be_used_is_refused_before_an_episode(mcp, words):
    with pytest.raises(EnvironmentFailed, match=words) as failed:
        async with pool_of(**mcp):
            pass
    assert "environments.served.mcp: " in str(failed.value)


@pytest.mark.parametrize(("given", "words"), [
    ({}, "neither of command and url"), ({"command": ["a"], "url": "http://h"}, "both of command and url"),
    ({"url": "http://h", "variables": {"A": "1"}}, "variables are those of a server"),
    ({"command": ["a"], "token_variable": "T"}, "token_variable is sent to a server at `url`"),
    ({"url": "ftp://h"}, "not of the form http"), ({"url": "http://u:p@h"}, "user name or password"),
    ({"url": "http://h", "token_variable": "T"}, "plain http, so the token could be intercepted"),
    ({"command": ["a"], "tools": []}, "at least 1"),
])
def test_settings_that_cannot_be_meant_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        McpSource(**given)


@pytest.fixture
def url():
    """URL of a server that runs, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)])
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@in_loop
async def test_a_server_with_a_url_is_shared_and_gets_the_token(url, monkeypatch):
    address, process = url
    monkeypatch.setenv("TOKEN_OF_SERVER", "s3cret")
    async with pool_of(url=address, token_variable="TOKEN_OF_SERVER", timeout_s=2) as pool:
        first, second = await pool.open({}, seed=1), await pool.open({}, seed=1)
        assert [(await call(each, "count"))[0] for each in (first, second)] == ["1", "2"]
        assert (await call(first, "pid"))[0] == str(process.pid)
        assert (await call(first, "authorization"))[0] == "Bearer s3cret"
        assert (await call(first, "fails", message="not so"))[1] == 1
        process.kill()
        process.wait()
        with pytest.raises(EpisodeFailed, match="ended its connection") as failed:
            await call(first, "count")
        assert failed.value.cause == "error_environment"
