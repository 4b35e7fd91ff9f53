"""Saved samples as JSON lines for other programs: the whole conversation, rewards, and every number per token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rlhf_ray.observability.sample_files import PER_TOKEN

TOKEN_COLUMNS = ("token_ids", "token_texts", "response_mask", *PER_TOKEN, "versions")
EPISODE = ("environment", "cause", "use", "error")


def write_json_lines(rows: Iterable[Mapping[str, Any]], file: TextIO) -> int:
    """Write an object a line for each saved sample; returns their number."""
    count = 0
    for row in rows:
        file.write(json.dumps(json_of(row), allow_nan=False) + "\n")
        count += 1
    return count


def json_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A saved sample as one object. Numbers that are missing or not finite are null, as is what only an episode has in
    a single response, which is one turn; `segments` has the columns per token, cut where a new sequence begins."""
    turns = _turns(row)
    episode = row.get("turns") is not None
    mask = row["response_mask"]
    sampled = [i for i, is_sampled in enumerate(mask) if is_sampled]
    advantages = row["advantages"]
    return _finite({
        "step": row["step"],
        "key": {name: row[name] for name in ("epoch", "row", "sample")},
        **{name: row[name] if episode else None for name in EPISODE},
        "prompt": row["prompt"],
        "response": row["response"],
        "messages": _messages(row, turns),
        "tools": json.loads(row["tools"]) if episode else None,
        "turns": turns,
        "score": row["score"],
        "rewards": {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")},
        "kl": row["kl"],
        "gold": row["gold"],
        "advantage": sum(advantages[i] for i in sampled) / len(sampled) if sampled and advantages is not None else None,
        "length": len(sampled),
        "finish_reason": row["finish_reason"],
        "metrics": dict(row["metrics"]) if episode else None,
        "events": dict(row["events"]) if episode else None,
        "segments": _segments(row),
    })


def _turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each turn with its calls and messages; a single response is one turn, whose reward is the sample's."""
    if row.get("turns") is not None:
        return [{**turn, **{name: json.loads(turn.get(name) or "[]") for name in ("tool_calls", "messages", "opens")}}
                for turn in row["turns"]]
    mask = row["response_mask"]
    start = mask.index(True) if True in mask else len(mask)
    stop = len(mask) - mask[::-1].index(True) if True in mask else len(mask)
    return [{"segment": 0, "start": start, "stop": stop, "seed": None, "finish_reason": row["finish_reason"],
             "reward": row["score"], "text": row["response"], "tool_calls": [], "messages": [], "opens": []}]


def _messages(row: Mapping[str, Any], turns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The whole conversation as OpenAI's chat completions have it: the content of a turn is all that was sampled, the
    markup of its calls included. A prompt that is a text is a message of the user. Where an agent began another
    conversation, its messages follow."""
    messages = json.loads(row["messages"]) if row["messages"] else [{"role": "user", "content": row["prompt"]}]
    for number, turn in enumerate(turns, start=1):
        calls = [call for call in turn["tool_calls"] if "name" in call]
        answers = [dict(message) for message in turn["messages"]]
        ids = _call_ids(calls, [answer for answer in answers if answer.get("role") == "tool"], number)
        said: dict[str, Any] = {"role": "assistant", "content": turn["text"]}
        if calls:
            said["tool_calls"] = [
                {"id": name, "type": "function",
                 "function": {"name": call["name"], "arguments": _arguments(call.get("arguments"))}}
                for name, call in zip(ids, calls, strict=True)]
        messages += [*turn["opens"], said, *answers]
    return messages


def _call_ids(calls: Sequence[Mapping[str, Any]], answers: Sequence[dict[str, Any]], turn: int) -> list[str]:
    """Ids of a turn's calls, which are answered in their order: that of the call, of its answer, or a new one. An
    answer without an id gets that of its call."""
    ids = []
    for i, call in enumerate(calls):
        answer = answers[i] if i < len(answers) else {}
        ids.append(call.get("id") or answer.get("tool_call_id") or f"call_{turn}_{i + 1}")
        answer.setdefault("tool_call_id", ids[-1])
    return ids


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def _segments(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The columns per token of each row of a sample."""
    segments, start = [], 0
    for length in row["row_lengths"]:
        cut = slice(start, start + length)
        segments.append({name: None if row[name] is None else row[name][cut] for name in TOKEN_COLUMNS})
        start += length
    return segments


def _finite(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
