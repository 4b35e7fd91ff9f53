"""Resources servers of NeMo-Gym as environments, by a server that answers what a real one did
(`tests/nemo_gym_wire.py`; a real one is started by `tests/slow/test_nemo_gym_server.py`)."""

import asyncio
import functools
from contextlib import asynccontextmanager

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.protocol import Reply, ToolCall
from rlhf_ray.errors import EpisodeFailed
from tests.nemo_gym_wire import OUTPUT, ROW, SENT, Replayed

GIVEN = {"prompt": "Buy tea.", **ROW}


def in_loop(test):
    """A test that is a coroutine."""
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))
    return run


@asynccontextmanager
async def pool_at(url, **nemo_gym):
    pool = EnvironmentPool("served", EnvironmentConfig(nemo_gym={"url": url, **nemo_gym}))
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()


def call(number, name, **arguments):
    return Reply("", tool_calls=[ToolCall(name, arguments, str(number))])


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TOKEN_OF_SERVER", "s3cret")


@in_loop
async def test_a_server_may_be_said_to_be_replayable():
    async with pool_at("http://127.0.0.1:9", replayable=True) as pool:
        assert (await pool.start()).replayable


@in_loop
async def test_a_slow_tool_is_an_answer():
    server = Replayed()
    with server.running() as url:
        async with pool_at(url, timeout_s=0.5) as pool:
            environment = await pool.open(GIVEN, seed=1)
            server.delay_s = 1.0
            step = await environment.step(call(0, "look_up", item="tea"))
            server.delay_s = 0.0
            assert (await environment.step(call(1, "buy", item="tea"))).tool_errors == 0
    assert step.tool_errors == 1
    assert step.messages[0]["content"] == "Error: look_up: it gave no answer within 0.5 s"


@in_loop
async def test_an_episode_is_the_requests_of_nemo_gyms_own_agent():
    """As `SimpleAgent` of nemo-gym 0.4.0 (responses_api_agents/simple_agent/app.py) makes them: a real server has
    accepted `SENT`."""
    server = Replayed()
    with server.running() as url:
        async with pool_at(url, token_variable="TOKEN_OF_SERVER") as pool:
            assert not (await pool.start()).replayable
            environment = await pool.open(GIVEN, seed=1)
            assert environment.start.messages == [{"role": "system", "content": "Be brief."},
                                                  {"role": "user", "content": "Buy tea."}]
            assert environment.start.tools[0] == {"type": "function", "function": {
                "name": "look_up", "description": "look_up an item", "parameters": {
                    "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}
            first = await environment.step(call(0, "look_up", item="tea"))
            last = await environment.step(Reply("Done.", content="Done."))
            assert await environment.reward() == 1.0
    assert first.messages == [{"role": "tool", "name": "look_up", "tool_call_id": "0", "content": '{"euros":3}'}]
    assert (first.done, first.reward, last.done) == (False, 0.0, True)
    seeded, looked_up, verified = server.asked
    assert seeded[:2] == ("/seed_session", GIVEN) and looked_up[:2] == SENT[1]
    assert verified[0] == "/verify" and verified[1] == {**SENT[4][1], "prompt": "Buy tea."}
    assert [cookie for _, _, cookie in server.asked] == ["", "session=1", "session=1"]
    assert set(server.authorizations) == {"Bearer s3cret"}


@in_loop
async def test_wrong_calls_are_read_and_verified_like_others():
    server = Replayed()
    with server.running() as url:
        async with pool_at(url) as pool:
            environment = await pool.open(GIVEN, seed=1)
            steps = [await environment.step(call(0, "look_up", thing="tea")), await environment.step(call(1, "verify"))]
            assert await environment.reward() == 1.0, "asked where the episode was cut off, too"
    assert [step.tool_errors for step in steps] == [1, 1]
    assert "Field required" in steps[0].messages[0]["content"]
    assert steps[1].messages[0]["content"] == "Error: there is no tool 'verify'; the tools are look_up, buy"
    assert [path for path, *_ in server.asked] == ["/seed_session", "/look_up", "/verify"]
    kinds = [item["type"] for item in server.asked[-1][1]["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2


@in_loop
async def test_a_reply_is_given_back_whole():
    server = Replayed()
    with server.running() as url:
        async with pool_at(url) as pool:
            environment = await pool.open(GIVEN, seed=1)
            reply = call(0, "look_up", item="tea")
            reply.content, reply.reasoning = "I look.", "cheap?"
            await environment.step(reply)
            await environment.reward()
    output = server.asked[-1][1]["response"]["output"]
    assert output[0] == {"type": "reasoning", "id": "reasoning_0",
                         "summary": [{"type": "summary_text", "text": "cheap?"}]}
    assert output[1]["content"][0]["text"] == "I look." and output[2:] == OUTPUT[:2]


@in_loop
async def test_two_episodes_have_two_sessions():
    server = Replayed()
    with server.running() as url:
        async with pool_at(url) as pool:
            for environment in [await pool.open(GIVEN, seed=1) for _ in range(2)]:
                await environment.step(call(0, "buy", item="tea"))
    assert [cookie for path, _, cookie in server.asked if path == "/buy"] == ["session=1", "session=2"]




@pytest.mark.parametrize(("row", "words"), [
    ({"prompt": "x", "item": "tea"}, "no column responses_create_params with an object"),
    ({**GIVEN, "responses_create_params": {"input": [{"type": "function_call", "name": "a"}]}}, "no message of text"),
    ({**GIVEN, "responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}, "is no function"),
    ({**GIVEN, "item": "gold"}, "/seed_session answered 404"),
])
def test_a_row_that_is_none_of_nemo_gyms_is_refused(row, words):
    async def run():
        with Replayed().running() as url:
            async with pool_at(url) as pool:
                await pool.open(row, seed=1)

    with pytest.raises(EpisodeFailed, match=words):
        asyncio.run(run())


@in_loop
async def test_a_server_that_is_gone_is_the_environments_failure():
    with Replayed().running() as url:
        async with pool_at(url) as pool:
            environment = await pool.open(GIVEN, seed=1)
    async with pool_at(url) as pool:
        with pytest.raises(EpisodeFailed, match=f"there is no NeMo-Gym server at {url}") as failed:
            await pool.open(GIVEN, seed=1)
    assert failed.value.cause == "error_environment" and environment is not None
