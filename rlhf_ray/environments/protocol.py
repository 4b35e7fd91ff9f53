"""What an environment is asked, and what it answers. It imports the standard library alone, so that the code of a user
can import it cheaply.

An environment is recognised by its shape; there is no base class.

- Tools: a plain function with type hints and a docstring, a list of such functions, or a class with
  `reset(**row)` whose other public methods are the tools, and optionally `get_reward() -> float`.
  A class whose tools are known only when it runs has `tool_schemas() -> list` (a class method: their JSON schemas) and
  `call_tool(name, arguments) -> (content, failed)` in place of the methods; what `call_tool` raises is a failure of the
  environment, and not the tool's.
- An environment in messages: a class with `reset(row, seed) -> Start` and `step(reply) -> Step`, and optionally
  `close()` and `get_reward() -> float`, which is asked once at the end and added to the last turn's reward; each may
  be a coroutine function.
- An agent, which has its own loop and asks the policy over HTTP: a function `agent(row, session) -> float | Result`,
  which may be a coroutine function.

A class of either shape may have `replayable = False`, which says that the same actions may be answered differently.
It may have both `snapshot()`, which returns bytes or what JSON holds, and `restore(snapshot)`, which brings a new
instance to that state in place of `reset`: an episode whose process was lost goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""{"role": ..., "content": ...}, as chat templates take it."""


class EnvironmentBroken(Exception):
    """What a tool raises if not the call has failed but the environment: the policy does not read it."""


@dataclass
class ToolCall:
    """A call of a tool by the policy."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Unique within the episode."""


@dataclass
class Reply:
    """What the policy wrote in a turn."""

    text: str
    """All of it, special tokens included, without the token that ended it."""
    content: str = ""
    """The text without reasoning and tool calls."""
    reasoning: str = ""
    """What stands in <think>, if the model's template knows it."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "stop"
    """"stop", or "length" for a turn that was cut off."""


@dataclass
class Start:
    """How an episode begins."""

    messages: list[Message] | None = None
    """What the policy reads first; None for the prompt of the row."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools that the policy may call (`transformers.utils.get_json_schema`)."""
    observation: str = ""
    """Text that the policy reads after the prompt of the row, in the same message; not with `messages`."""


@dataclass
class Step:
    """How an environment answers a turn."""

    messages: list[Message] = field(default_factory=list)
    """What the policy reads next; not read if the episode is done."""
    reward: float = 0.0
    """Of this turn."""
    done: bool = False
    """The episode is complete."""
    truncated: bool = False
    """The environment ends the episode before it is complete."""
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers in it become metrics: the last value of each name in an episode."""
    tool_errors: int = 0
    """Tool calls that failed, and whose error the policy reads."""


@dataclass(frozen=True)
class AgentSession:
    """How an agent reaches the policy in one attempt at an episode. When the attempt has ended, its URL answers no
    more."""

    base_url: str
    """For clients of OpenAI's chat completions: "http://127.0.0.1:41231/5f0c.../v1"."""
    anthropic_url: str
    """For clients of Anthropic's messages, whose path they append: "http://127.0.0.1:41231/5f0c..."."""
    api_key: str
    model: str
    """What requests may name as their model; other names are accepted, too."""
    seed: int
    """Of the episode's world, in [0, 2**31): all samples of a prompt have the same."""
    max_tokens: int
    """Tokens of each segment of the episode at most, read and written (`environments.NAME.max_tokens`)."""
    max_turns: int
    """Requests at most."""


@dataclass
class Result:
    """What an agent returns."""

    reward: float | None = None
    """Of the whole episode; None leaves it to the other components of `rewards`."""
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers in it become metrics, as those of `Step.info`."""
    truncated: bool = False
    """The agent ended before it was done."""
