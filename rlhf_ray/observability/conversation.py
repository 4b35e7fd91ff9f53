"""Prompts and responses as text for people: turns of a conversation, with control characters shown by their escapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One message of a prompt, or a prompt that is a text (role "prompt")."""

    role: str
    text: str


def turns_of(row: Mapping[str, Any]) -> list[Turn]:
    """The prompt of a row with a text `prompt` and perhaps `messages` (a list, or JSON of it)."""
    messages = row.get("messages")
    if isinstance(messages, str):
        messages = json.loads(messages)
    if not messages:
        return [Turn("prompt", escaped(row.get("prompt") or ""))]
    return [Turn(escaped(str(each["role"])), escaped(str(each["content"]))) for each in messages]


def in_lines(turns: list[Turn]) -> str:
    """A prompt as one text; the messages of a conversation begin with their roles."""
    return "\n".join(turn.text if turn.role == "prompt" else f"{turn.role}: {turn.text}" for turn in turns)


def escaped(text: str) -> str:
    """`text` with control characters, which could move the cursor or colour the terminal, and with halves of surrogate
    pairs, which no file can hold, as their escapes: \\x1b, \\ud83d."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
