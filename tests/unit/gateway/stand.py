"""A gateway on loopback, and a policy that answers by script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rlhf_ray.environments.protocol import ToolCall
from rlhf_ray.gateway.chat import ChatReply, ChatRequest, SessionAddress
from rlhf_ray.gateway.server import Gateway

DEADLINE_S = 40


def reply(content: str = "Sunny.", turn: int = 0, **fields: Any) -> ChatReply:
    """A turn of 3 tokens after 7."""
    given = {"reasoning": "", "tool_calls": [], "finish_reason": "stop", "prompt_tokens": 7, "completion_tokens": 3,
             "turn": turn, **fields}
    return ChatReply(content=content, **given)


def calling(*calls: ToolCall, content: str = "", **fields: Any) -> ChatReply:
    return reply(content, tool_calls=list(calls), finish_reason="tool_calls", **fields)


@dataclass
class Script:
    """A policy whose turns are given; numbers them."""

    turns: list[Any] = field(default_factory=list)
    """A `ChatReply`, an exception, or a coroutine function of the request that gives one; the last is repeated."""
    asked: list[ChatRequest] = field(default_factory=list)
    delivered_turns: list[int] = field(default_factory=list)
    left_requests: list[ChatRequest] = field(default_factory=list)
    loops: set[asyncio.AbstractEventLoop] = field(default_factory=set)

    async def reply(self, request: ChatRequest) -> ChatReply:
        self.loops.add(asyncio.get_running_loop())
        turn = self.turns[min(len(self.asked), len(self.turns) - 1)]
        self.asked.append(request)
        if callable(turn):
            turn = await turn(request)
        if isinstance(turn, BaseException):
            raise turn
        return turn

    def delivered(self, reply: ChatReply) -> None:
        self.loops.add(asyncio.get_running_loop())
        self.delivered_turns.append(reply.turn)

    def left(self, request: ChatRequest) -> None:
        self.loops.add(asyncio.get_running_loop())
        self.left_requests.append(request)


@dataclass
class Stand:
    """A running gateway with one session."""

    gateway: Gateway
    policy: Script
    address: SessionAddress
    warnings: list[str]


Scenario = Callable[[Stand], Awaitable[Any]]


@asynccontextmanager
async def standing(turns: list[Any]):
    warnings: list[str] = []
    gateway = Gateway("127.0.0.1", warnings.append)
    await gateway.start()
    policy = Script(turns)
    try:
        yield Stand(gateway, policy, gateway.open(policy, "policy"), warnings)
    finally:
        await gateway.stop()


def played(scenario: Scenario, *turns: Any, loop_factory: Any = None) -> Any:
    """What `scenario(stand)` returns beside a running gateway."""

    async def run() -> Any:
        async with asyncio.timeout(DEADLINE_S), standing(list(turns) or [reply()]) as stand:
            return await scenario(stand)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run())
