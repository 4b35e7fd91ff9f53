"""Agents in processes that ask the policy by HTTP, with the stock `openai` client. Generators and the chat template are
stand-ins: a token is a character, and 0 ends a turn."""

import asyncio
import contextlib
import json
import sys
from dataclasses import replace

import pytest

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.environments.pool import EnvironmentPool
from rlhf_ray.environments.tool_calls import ToolCallParser
from rlhf_ray.roles.episode import TextTools
from rlhf_ray.roles.episode_journal import JournalPlace
from rlhf_ray.roles.episode_runner import EpisodeRunner
from tests.unit.roles.agent_plays import Generators, Template, play, rows_of, turns
from tests.unit.roles.test_episode_continues import assert_same, directory_of

CODE = r'''
import asyncio, json, os, time
import httpx
from openai import AsyncOpenAI, OpenAI

class Till:
    """Adds up."""
    def reset(self, seed):
        self.sum = seed % 10
    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: what
        """
        self.sum += number
        return self.sum
    def get_reward(self):
        return self.sum / 8

def adds(row, session):
    """Does what the runner does with a class with tools."""
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    till = Till()
    till.reset(session.seed)
    tools = [{"type": "function", "function": {
        "name": "add", "description": "Adds.", "parameters": {
            "type": "object", "properties": {"number": {"type": "integer", "description": "what"}},
            "required": ["number"]}, "return": {"type": "integer"}}}]
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = client.chat.completions.create(model=session.model, messages=messages, tools=tools, temperature=0.3)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return till.get_reward()
        for call in message.tool_calls:
            result = till.add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

async def fans_out(row, session):
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    async def ask(text, **fields):
        reply = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": text}], **fields)
        return reply.choices[0].message.content
    first = await ask("go")
    parts = await asyncio.gather(*(ask(f"{first} {i}") for i in range(8)))
    stream = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": " ".join(parts)}], stream=True)
    text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
    return float(text == "a")

def impatient(row, session):
    """Gives up a request, which the client sends again by itself."""
    client = OpenAI(base_url=session.base_url, api_key=session.api_key, timeout=0.4, max_retries=8)
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "slow"}])
    return len(reply.choices[0].message.content)

def leaves(row, session):
    """Asks and does not wait for the answer."""
    client = OpenAI(base_url=session.base_url, api_key=session.api_key, timeout=0.4, max_retries=0)
    try:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "slow"}])
    except Exception:
        pass
    time.sleep(0.8)
    client.with_options(timeout=30).chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    return 1

def overflows(row, session):
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    ask = lambda text: client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    ask("go")
    ask("x" * 500)

def too_many(row, session):
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    while True:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])

def once(row, session):
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])

def late(row, session):
    """Asks when its episode is over."""
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    time.sleep(1.0)
    try:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "on"}])
    except Exception as error:
        open(row["file"], "w").write(f"{error.status_code}")

def dies(row, session):
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages = [{"role": "user", "content": "go"}]
    for text in ("one", "two"):
        message = client.chat.completions.create(model="m", messages=messages).choices[0].message
        messages += [message, {"role": "user", "content": text}]
        if text == "two" and not os.path.exists(row["file"]):
            open(row["file"], "w").close()
            os.kill(os.getpid(), 9)
    return 1

def program():
    row = json.load(open(os.environ["RLHF_RAY_ROW"]))
    client = OpenAI()
    reply = client.chat.completions.create(
        model=os.environ["RLHF_RAY_MODEL"], messages=[{"role": "user", "content": row["prompt"]}])
    print(reply.choices[0].message.content)
    open("reward.txt", "w").write("0.5")

if __name__ == "__main__":
    program()
'''


@pytest.fixture
def runner_of(tmp_path):
    """runner_of(source, generators, template=Template(), **fields): a started runner of one environment or agent, as an
    asynchronous context manager. `source` is a name in CODE, or a command."""
    (tmp_path / "asks.py").write_text(CODE)

    @contextlib.asynccontextmanager
    async def build(source, generators, template=None, **fields):
        what = {"path": f"{tmp_path}/asks.py:{source}"} if isinstance(source, str) else {"command": source}
        config = EnvironmentConfig(**what, **{"processes": 1, **fields})
        runner = EpisodeRunner({"mine": config}, ModelConfig(path="m"), SamplingConfig(max_tokens=120), generators,
                               least_scored=0)
        runner._pools = {"mine": EnvironmentPool("mine", config)}
        facts = await runner._pools["mine"].start()
        if facts.shape == "agent":
            runner._agents = {"mine"}
            await runner._gateway.start()
        runner._texts = {"mine": TextTools(template or Template(), ToolCallParser.of("json"),
                                           lambda tokens: "".join(map(chr, tokens)), [0], 0)}
        yield runner  # `play` stops it

    return build


def played(runner_of, source, generators, journal=None, row=None, **fields):
    async def live():
        async with runner_of(source, generators, **fields) as runner:
            rollout = await play(runner, journal, row)
            return rollout, runner.printed()

    return asyncio.run(live())


ADD = '{"name": "add", "arguments": {"number": %d}}'
SCRIPT = (ADD % 2, f"so\n{ADD % 3}\n{ADD % 4}", ADD % 5, " done ")


class Ids(Template):
    """Writes the ids of results, as Mistral's templates do."""

    @staticmethod
    def _written(message):
        return f"{message.get('tool_call_id', '')}{Template._written(message)}"


class Rewrites(Template):
    """Writes earlier turns in capitals once others follow."""

    def continues(self, messages, tools=None, **_):
        return False

    def assistant(self, text, **_):
        return {"role": "assistant", "content": text.upper()}


@pytest.mark.parametrize("template", [Template, Ids, Rewrites])
def test_an_agent_has_the_tokens_seeds_and_masks_of_an_environment_that_does_the_same(runner_of, template):
    def script(context, seed):
        return SCRIPT[{0: 0, 1: 1, 3: 2, 4: 3}[context.count("#")]]

    native, _ = played(runner_of, "Till", Generators(script), template=template())
    agent, lines = played(runner_of, "adds", Generators(script), template=template())
    assert len(native.episodes[0].turns) == 4 and native.episodes[0].turns[-1].reward > 0
    assert any("temperature" in line and "replaces" in line for line in lines), lines
    expected = replace(native.episodes[0], turns=[
        replace(turn, messages=[{k: v for k, v in each.items() if k != "name"} for each in turn.messages])
        for turn in native.episodes[0].turns])
    found = agent.episodes[0]
    opens = [turn.opens for turn in found.turns]
    assert [bool(each) for each in opens] == [template is Rewrites and i > 0 for i in range(4)]
    found = replace(found, turns=[
        replace(turn, opens=[], messages=[{k: v for k, v in each.items() if k != "name"} for each in turn.messages])
        for turn in found.turns])
    if template is Rewrites:  # what is read in a new segment is there in `opens`
        expected = replace(expected, turns=[replace(turn, messages=[]) for turn in expected.turns])
    assert_same(replace(agent, episodes=[found]), replace(native, episodes=[expected]), overridden=4)


def test_sub_agents_and_streams_of_a_stock_client(runner_of):
    generators = Generators(turns("a"))
    rollout, _ = played(runner_of, "fans_out", generators)
    [found] = rollout.episodes
    assert (found.cause, found.turns[-1].reward, len(rollout)) == ("completed", 1.0, 10), found.error
    assert len({request.seed for request in generators.requests}) == 10


CURL = """curl -sS -m 9 "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -d '{"messages": [{"role": "user", "content": "go"}]}' | grep -q "$RLHF_RAY_MODEL" && echo 1"""


@pytest.mark.parametrize("before", [{}, {"no_proxy": "here.org"}, {"NO_PROXY": "here.org", "no_proxy": ""}])
@pytest.mark.parametrize("agent", ["once", [sys.executable, "{file}"], ["sh", "-c", CURL]])
def test_a_proxy_of_the_environment_is_not_between_an_agent_and_the_gateway(
        runner_of, tmp_path, monkeypatch, agent, before):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    source = agent if isinstance(agent, str) else {"run": agent, "reward": "stdout" if "-c" in agent else "file"}
    rollout, _ = played(runner_of, source, Generators(turns("ok")), row={"file": f"{tmp_path}/asks.py", "prompt": "go"})
    [found] = rollout.episodes
    assert (found.cause, len(found.turns)) == ("completed", 1), found.error


def test_a_client_that_tries_again_gets_the_turn_that_is_sampled_already(runner_of):
    class Slow(Generators):
        async def call(self, *args, **named):
            await asyncio.sleep(1.2)
            return await super().call(*args, **named)

    generators = Slow(turns("abc"))
    rollout, _ = played(runner_of, "impatient", generators)
    [found] = rollout.episodes
    assert (found.cause, found.turns[-1].reward, found.events) == ("completed", 3.0, {}), found.error
    assert len(generators.requests) == 1


def test_a_turn_whose_client_has_left_is_abandoned(runner_of):
    class Slow(Generators):
        async def call(self, method, requests, *args, **named):
            if requests[0].prompt[0] == ord("s"):
                await asyncio.sleep(0.7)
            return await super().call(method, requests, *args, **named)

    rollout, _ = played(runner_of, "leaves", Slow(turns("abc")))
    assert rollout.episodes[0].events == {"abandoned": 1} and rows_of(rollout) == ["go?[abc.]"]


@pytest.mark.parametrize("source, fields, cause, turns_made", [
    ("overflows", {"max_tokens": 100}, "truncated_episode", 1), ("too_many", {"max_turns": 3}, "truncated_turns", 3)])
def test_what_a_stock_client_is_refused_ends_its_agent_with_the_cause(runner_of, source, fields, cause, turns_made):
    generators = Generators(turns("a"))
    rollout, _ = played(runner_of, source, generators, **fields)
    [found] = rollout.episodes
    assert (found.cause, found.use, len(found.turns)) == (cause, "train", turns_made), found.error
    assert len(generators.requests) == turns_made


def test_a_session_answers_no_more_when_its_episode_has_ended(runner_of, tmp_path):
    file = tmp_path / "status"

    async def live():
        async with runner_of("late", Generators(turns("a")), timeout_s={"episode": 0.9}) as runner:
            pool = runner._pools["mine"]

            async def later():
                pass

            stop, runner.stop = runner.stop, later
            rollout = await play(runner, None, {"file": str(file)})
            for _ in range(400):
                if file.exists() and file.read_text():
                    break
                await asyncio.sleep(0.01)
            await stop()
            assert not pool._hosts._processes
            return rollout

    [found] = asyncio.run(live()).episodes
    assert (found.cause, len(found.turns)) == ("error_timeout", 1)
    assert file.read_text() == "410"


def test_an_agent_whose_process_dies_continues_in_another_one(runner_of, tmp_path):
    generators = Generators(turns("a", "b"))
    rollout, _ = played(runner_of, "dies", generators, row={"file": str(tmp_path / "died")})
    assert rows_of(rollout) == ["go?[a.]one?[b.]"] and len(generators.requests) == 2
    assert rollout.episodes[0].events == {"interrupted": 1}


def test_an_agent_s_episode_of_a_lost_runner_continues_over_the_gateway(runner_of, tmp_path):
    class Holds(Generators):
        async def call(self, method, requests, *args, **named):
            if "".join(map(chr, requests[0].prompt)).count("#") == 2:
                held.set()
                await asyncio.Event().wait()
            return await super().call(method, requests, *args, **named)

    place = JournalPlace(directory_of(tmp_path, "run"), 0, 0, look=True)
    script = turns(ADD % 2, ADD % 3, ADD % 4, "done")
    held = asyncio.Event()

    async def lost():
        async with runner_of("adds", Holds(script)) as runner:
            playing = asyncio.ensure_future(play(runner, place))
            await held.wait()
            playing.cancel()
            await asyncio.wait([playing])

    asyncio.run(lost())
    expected, _ = played(runner_of, "adds", Generators(script))
    generators = Generators(script)
    found, _ = played(runner_of, "adds", generators, journal=place)
    assert len(generators.requests) == 2
    assert_same(found, expected, continued=1)


def test_a_program_plays_an_episode(runner_of, tmp_path):
    command = [sys.executable, f"{tmp_path}/asks.py"]
    rollout, lines = played(runner_of, command, Generators(turns("hello")), row={"by": "me"})
    [found] = rollout.episodes
    assert (found.cause, found.turns[-1].reward) == ("completed", 0.5), found.error
    assert rows_of(rollout) == ["go?[hello.]"] and "environments.mine: hello" in lines
    assert json.dumps(found.messages) == '[{"role": "user", "content": "go"}]'
