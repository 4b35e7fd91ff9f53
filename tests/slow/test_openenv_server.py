"""Real servers of OpenEnv, in an environment of their own: what is committed as their answers is what they answer, and
sessions are freed. Skipped where the package cannot be installed."""

import asyncio
import json
import os

import httpx
import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, ToolCall
from tests.openenv_wire import FRAMES, LIST, SENT, talk
from tests.pages import ROOT
from tests.slow.packages import python_with, serving

pytestmark = pytest.mark.slow
OPENENV = "openenv==0.10.0"
SERVERS = {"guess": [ROOT / "configs/examples/adapters/openenv_server.py"], "shop": [ROOT / "tests/openenv_server.py"]}
SESSIONS = 2


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has the package."""
    return python_with(OPENENV, tmp_path_factory.mktemp("openenv") / "venv")


def running(python, name):
    """The port of a server with two sessions."""
    return serving([python, *SERVERS[name]], str(SESSIONS), path="/health")


def refused(port):
    """What a server answers when all its sessions are in use."""
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{port}/ws") as first, connect(f"ws://127.0.0.1:{port}/ws") as second:
        for each in (first, second):
            each.send(json.dumps(LIST))
            each.recv(timeout=30)
        return talk(port, [LIST])[0]


def test_the_committed_answers_are_those_of_a_real_server(python):
    found = {"openenv": OPENENV, "answers": {}, "schema": {}}
    for name, sent in SENT.items():
        with running(python, name) as port:
            found["answers"][name] = talk(port, sent)
            schema = httpx.get(f"http://127.0.0.1:{port}/schema", trust_env=False).json()
            found["schema"][name] = {"action": schema["action"]}
            found["refusal"] = refused(port)
    if os.environ.get("OPENENV_FRAMES") == "write":
        FRAMES.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    assert without_links(json.loads(FRAMES.read_text())) == without_links(found)


def without_links(found):
    """Without the links to pydantic's pages, which have its version."""
    return "\n".join(line for line in json.dumps(found, indent=1).splitlines() if "errors.pydantic.dev" not in line)


async def played(pool, number):
    environment = await pool.open({"prompt": "Play.", "highest": 9}, seed=number)
    try:
        for guess in range(1, 10):
            step = await environment.step(Reply(str(guess), content=str(guess)))
            if step.done:
                return step.reward
    finally:
        await environment.close()


def test_a_server_with_two_sessions_serves_many_episodes(python):
    """Also after episodes whose process was killed, which say no goodbye."""
    async def all_of_them(port):
        config = EnvironmentConfig(openenv={"url": f"http://127.0.0.1:{port}"}, concurrency=SESSIONS)
        pool = EnvironmentPool("guess", config)
        try:
            await pool.start()
            left = [await pool.open({"prompt": "Play."}, seed=1) for _ in range(SESSIONS)]
            for process in list(pool._hosts._processes):
                os.kill(process._process.pid, 9)
            rewards = []
            for number in range(6):
                rewards += await asyncio.gather(played(pool, number), played(pool, number))
            return rewards, len(left)
        finally:
            await pool.stop()

    with running(python, "guess") as port:
        rewards, left = asyncio.run(all_of_them(port))
        assert (rewards, left) == ([1.0] * 12, 2)
        assert [answer["type"] for answer in talk(port, [LIST])] == ["mcp"], "no session is left"


def test_tools_that_a_server_lists_are_called(python):
    async def play(port):
        pool = EnvironmentPool("shop", EnvironmentConfig(openenv={"url": f"http://127.0.0.1:{port}"}))
        try:
            await pool.start()
            environment = await pool.open({"prompt": "Play.", "item": "rice"}, seed=1)
            calls = [ToolCall("look_up", {"item": "rice"}, "a"), ToolCall("buy", {"item": "rice"}, "b")]
            return environment.start.tools, environment.observation, await environment.step(Reply("", tool_calls=calls))
        finally:
            await pool.stop()

    with running(python, "shop") as port:
        tools, observation, step = asyncio.run(play(port))
    assert [tool["function"]["name"] for tool in tools] == ["look_up", "buy"] and observation == "\n\nBuy rice."
    assert [message["content"] for message in step.messages] == ["5", "bought 1 rice"]
    assert step.done and step.reward == 1.0
