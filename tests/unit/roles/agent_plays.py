"""Agents that play without processes: a coroutine in place of each, which asks the policy directly. Generators and the
chat template are stand-ins: a token is a character, and 0 ends a turn."""

import asyncio
from types import SimpleNamespace

import numpy as np

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.environments.answers import plain_result
from rlhf_ray.environments.tool_calls import ToolCallParser
from rlhf_ray.errors import EpisodeFailed
from rlhf_ray.gateway.chat import ChatRequest, SessionAddress
from rlhf_ray.records import Prompts, SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode import TextTools
from rlhf_ray.roles.episode_runner import EpisodeRunner

KEY = SampleKey(0, 0, 0)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '{"name": "look", "arguments": {}}'
ENDS = {"system": "!", "user": "?", "tool": "#", "assistant": "\0"}


class Template:
    """A message is the characters of its content and a sign of its role; the policy's ends with 0. Calls are in its
    content."""

    def open(self, messages, tools=None, **_):
        begin = [ord("T")] if tools else []
        return [*begin, *(ord(c) for message in messages for c in self._written(message))]

    def delta(self, messages, tools=None, *, stopped_by=0, **_):
        return [*([] if stopped_by == 0 else [0]), *(ord(c) for each in messages for c in self._written(each))]

    def continues(self, messages, tools=None, **_):
        return True

    def assistant(self, text, **_):
        return {"role": "assistant", "content": text}

    def opens_reasoning(self, tools=None, options=None):
        return False

    @staticmethod
    def _written(message):
        return (message["content"] or "") + ENDS[message["role"]]


class Generators:
    """Write what `text_of(context, seed)` says, with log-probabilities that follow from the seed."""

    def __init__(self, text_of, version=0):
        self.text_of, self.version = text_of, version
        self.requests = []
        self.gates = {}
        """Futures by what the context ends with: those requests wait for them."""

    async def call(self, method, requests, *args, **named):
        [request] = requests
        self.requests.append(request)
        context = "".join(map(chr, request.prompt))
        for end, gate in self.gates.items():
            if context.endswith(end):
                await gate
        text = self.text_of(context, request.seed)
        if isinstance(text, Exception):
            raise text
        whole = [*map(ord, text), 0]
        for stop in request.sampling.stop:
            if stop in text:
                whole = [*map(ord, text[:text.index(stop) + len(stop)])]
        kept = whole[:request.max_tokens]
        random = np.random.default_rng(request.seed)
        masks = tuple(random.integers(0, 99, size).astype(np.int32) for size in random.integers(1, 5, len(kept)))
        return [Completion(np.array(kept, np.int32), -random.random(len(kept)).astype(np.float32),
                           np.full(len(kept), self.version, np.int32),
                           "stop" if len(kept) == len(whole) else "length", masks)]


def turns(*texts):
    """The text of each turn by how many turns the context has, and the last one again and again."""
    return lambda context, seed: texts[min(context.count("\0"), len(texts) - 1)]


class Client:
    """An agent's side of a session."""

    def __init__(self, policy):
        self.policy = policy

    async def ask(self, *messages, deliver=True, **fields):
        """The policy's reply to messages, given as (role, content) or as dicts."""
        request = ChatRequest([as_message(each) for each in messages], **fields)
        reply = await self.policy.reply(request)
        if deliver:
            self.policy.delivered(reply)
        else:
            self.policy.left(request)
        return reply


def as_message(message):
    return message if isinstance(message, dict) else {"role": message[0], "content": message[1]}


def said(reply):
    """A reply as the message that a client keeps."""
    message = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls]
    return message


class Agents:
    """In place of a pool and of a gateway: runs a coroutine function agent(client, row, session)."""

    facts = SimpleNamespace(shape="agent")

    def __init__(self, agent):
        self.agent = agent
        self.policies = []
        self.closed = 0
        self.why_out_of_reach = ""
        self.restarts = 0
        """So many runs lose their process when they end."""

    def open(self, policy, model):
        self.policies.append(policy)
        return SessionAddress(f"http://host/{len(self.policies)}/v1", f"http://host/{len(self.policies)}", "key")

    async def close(self, address):
        self.closed += 1

    async def out_of_reach(self):
        return self.why_out_of_reach

    async def run(self, row, begin, pace):
        while True:
            session = await begin()
            pace.begins()
            try:
                answer = plain_result(await self.agent(Client(self.policies[-1]), row, session))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if isinstance(error, EpisodeFailed | AssertionError):
                    raise
                raise EpisodeFailed("error_agent", f"the agent failed: {type(error).__name__}: {error}") from error
            if not self.restarts:
                return answer
            self.restarts -= 1

    async def stop(self):
        pass

    def printed(self):
        return []


def runner_of(agent, generators, template=None, sampling=None, **fields):
    agents = agent if isinstance(agent, Agents) else Agents(agent)
    config = EnvironmentConfig(path="mine.py:agent", **fields)
    runner = EpisodeRunner({"mine": config}, ModelConfig(path="m"), sampling or SamplingConfig(max_tokens=60),
                           generators, least_scored=0)
    runner._pools, runner._gateway, runner._agents = {"mine": agents}, agents, {"mine"}
    runner._texts = {"mine": TextTools(template or Template(), ToolCallParser.of("json"),
                                       lambda tokens: "".join(map(chr, tokens)), [0], 0)}
    return runner


async def play(runner, journal=None, row=None, **options):
    prompts = Prompts(np.arange(2), np.zeros(1, np.int32), ["go"], [row or {}], np.arange(1))
    try:
        return await runner.play(prompts, [KEY], 0, journal=journal, **options)
    finally:
        await runner.stop()


def episode(agent, generators, **fields):
    """(rollout, episode) of an agent."""
    options = {name: fields.pop(name) for name in ("template", "sampling") if name in fields}
    rollout = asyncio.run(play(runner_of(agent, generators, **options, **fields)))
    return rollout, rollout.episodes[0]


def rows_of(rollout):
    """Each row as text, with what was sampled in brackets."""
    found = []
    for i in range(len(rollout)):
        text = ""
        inside = False
        for token, sampled in zip(rollout.row(i, "tokens"), rollout.row(i, "response_mask"), strict=True):
            if sampled != inside:
                text += "[" if sampled else "]"
                inside = sampled
            text += "." if token == 0 else chr(token)
        found.append(text + ("]" if inside else ""))
    return found
