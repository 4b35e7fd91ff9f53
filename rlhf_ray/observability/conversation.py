"""Prompts and responses as text for people: turns of a conversation, with control characters shown by their escapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One message of a conversation, or a text: a prompt (role "prompt"), a response, a call of a tool ("call")."""

    role: str
    text: str


class Exchange(NamedTuple):
    """One turn of an episode."""

    segment: int
    """Number of its segment, from 1."""
    sampled: int
    """Tokens that the policy sampled."""
    reward: float
    finish_reason: str
    said: list[Turn]
    """What the policy wrote, its tool calls, and what the environment answered; before that, what it read first, where
    an agent began another conversation."""


def turns_of(row: Mapping[str, Any]) -> list[Turn]:
    """The prompt of a row with a text `prompt` and perhaps `messages` (a list, or JSON of it)."""
    messages = row.get("messages")
    if isinstance(messages, str):
        messages = json.loads(messages)
    if not messages:
        return [Turn("prompt", escaped(row.get("prompt") or ""))]
    return [turn for each in messages for turn in _turns_of_message(each)]


def exchanges_of(row: Mapping[str, Any]) -> list[Exchange]:
    """The turns of a saved sample that is an episode; none of a single response."""
    exchanges = []
    for turn in row.get("turns") or ():
        said = [part for message in json.loads(turn.get("opens") or "[]") for part in _turns_of_message(message)]
        said.append(Turn("assistant", escaped(turn["text"])))
        said += [Turn("call", escaped(call_in_words(call))) for call in json.loads(turn["tool_calls"])]
        said += [part for message in json.loads(turn["messages"]) for part in _turns_of_message(message)]
        exchanges.append(Exchange(turn["segment"] + 1, turn["stop"] - turn["start"], turn["reward"],
                                  turn["finish_reason"], said))
    return exchanges


def response_of(row: Mapping[str, Any]) -> list[Turn]:
    """What followed a row's prompt: one response, or the conversation of an episode."""
    said = [turn for exchange in exchanges_of(row) for turn in exchange.said]
    return said or [Turn("response", escaped(row.get("response") or ""))]


def call_in_words(call: Mapping[str, Any]) -> str:
    """A tool call as Python would write it: look_up(item="tea"); or why it could not be read."""
    function = call.get("function", call)
    if "name" not in function:
        return f"not readable: {call.get('error', call)}"
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        return f"{function['name']}({arguments})"
    values = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function['name']}({', '.join(values)})"


def _turns_of_message(message: Mapping[str, Any]) -> list[Turn]:
    """A message, and a line for each tool call in it."""
    content = message.get("content")
    if not isinstance(content, str):
        content = "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = [Turn("call", escaped(call_in_words(call))) for call in message.get("tool_calls") or ()]
    return [Turn(escaped(str(message["role"])), escaped(content)), *calls]


def in_lines(turns: list[Turn]) -> str:
    """A prompt or response as one text; the messages of a conversation begin with their roles."""
    return "\n".join(turn.text if turn.role in ("prompt", "response") else f"{turn.role}: {turn.text}"
                     for turn in turns)


def escaped(text: str) -> str:
    """`text` with control characters, which could move the cursor or colour the terminal, and with halves of surrogate
    pairs, which no file can hold, as their escapes: \\x1b, \\ud83d."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
