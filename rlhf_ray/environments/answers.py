"""What user code may answer, checked, as plain values that JSON holds. Standard library alone: it runs beside user
code."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlhf_ray.environments.protocol import Result, Start, Step
from rlhf_ray.user_code.loading import brief

ANSWER_BYTES = 1 << 24
"""Longest valid answer."""
MOST_NESTED = 100
"""Lists and dicts of an answer that may be within each other. Python's json reads and writes fewer than 1,000, and an
answer is part of a frame, of a record in a journal, and of a chat."""
LARGEST_REWARD = 1e30
"""Rewards, and the numbers of `info`, are added up in single precision, whose largest number is 3.4e38."""
STEP_TUPLE = ("messages", "reward", "done", "truncated", "info")
"""What a tuple of a step has, in this order, which is gymnasium's."""


def plain_start(answer: Any) -> dict[str, Any]:
    """The fields of what `reset` returned: a `Start`, or a dict with its keys.

    Raises:
        TypeError, ValueError: it is something else; shows the value.
    """
    given = _fields_of(answer, Start, "reset", ())
    messages = given.get("messages")
    if messages is not None:
        messages = plain_messages(messages, "reset")
        if not messages:
            raise ValueError("reset returned no messages; give at least one, or None for the prompt of the row")
    observation = given.get("observation", "")
    if not isinstance(observation, str):
        raise TypeError(f"reset returned the observation {brief(observation)}, which must be text")
    if observation and messages is not None:
        raise ValueError("reset returned messages and an observation, which is text after the prompt of the row; give "
                         "one of them")
    return {"messages": messages, "tools": plain_tools(given.get("tools", []), "reset"), "observation": observation}


def plain_step(answer: Any) -> dict[str, Any]:
    """The fields of what `step` returned: a `Step`, a dict with its keys, or a tuple as of `STEP_TUPLE`.

    Raises:
        TypeError, ValueError: it is something else; shows the value.
    """
    given = _fields_of(answer, Step, "step", STEP_TUPLE)
    done, truncated = (_flag(given.get(name, False), name, "step") for name in ("done", "truncated"))
    messages = plain_messages(given.get("messages", []), "step")
    if not (messages or done or truncated):
        raise ValueError("step returned no messages, although the episode is not done; the policy needs something to "
                         "read")
    errors = given.get("tool_errors", 0)
    if type(errors) is not int or errors < 0:
        raise TypeError(f"step returned tool_errors={brief(errors)}, which must be a number of tool calls")
    return {"messages": messages, "reward": plain_reward(given.get("reward", 0.0), "step"), "done": done,
            "truncated": truncated, "info": _numbers(given.get("info", {}), "step"), "tool_errors": errors}


def plain_result(answer: Any) -> dict[str, Any]:
    """The fields of what an agent returned: a `Result`, a dict with its keys, a reward, or None for none.

    Raises:
        TypeError, ValueError: it is something else; shows the value.
    """
    who = "the agent"
    if answer is None:
        given: Mapping[str, Any] = {}
    elif isinstance(answer, Result | Mapping):
        given = _fields_of(answer, Result, who, ())
    elif _number(answer) is None:
        raise TypeError(f"{who} returned {brief(answer)}; it must return its reward as a number, None for none, a "
                        "Result, or a dict with its keys (reward, info, truncated)")
    else:
        given = {"reward": answer}
    reward = given.get("reward")
    return {"reward": None if reward is None else plain_reward(reward, who),
            "info": _numbers(given.get("info", {}), who),
            "truncated": _flag(given.get("truncated", False), "truncated", who)}


def plain_reward(value: Any, who: str) -> float:
    """A finite number: a Python number, or a scalar of an array or tensor.

    Raises:
        TypeError, ValueError: it is something else; shows the value.
    """
    number = _number(value)
    if number is None:
        raise TypeError(f"{who} returned the reward {brief(value)}, which must be a number")
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{who} returned the reward {number}, which must be finite (at most {LARGEST_REWARD:g})")
    return number


def plain_messages(messages: Any, who: str) -> list[dict[str, Any]]:
    """Messages as chat templates take them: a list of dicts with role and content.

    Raises:
        TypeError: they are something else; shows the value.
    """
    if not isinstance(messages, list | tuple):
        raise TypeError(f"{who} returned the messages {brief(messages)}, which must be a list of dicts with role and "
                        "content")
    characters = 0
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise TypeError(f"message {place} of {who} is {brief(message)}, which must be a dict with role and "
                            "content")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise TypeError(f"the content of message {place} of {who} is {brief(message.get('content'))}, which must "
                            "be text")
        characters += len(message.get("content") or "")
        if characters > ANSWER_BYTES:
            raise ValueError(f"the messages of {who} have {characters} characters, and may have {ANSWER_BYTES}")
        _shallow_json(message, f"message {place} of {who}")
    return list(messages)


def plain_snapshot(value: Any) -> dict[str, Any]:
    """What `snapshot` returned, as JSON holds it: {"json": value}, or {"base64": text} of bytes.

    Raises:
        TypeError, ValueError: JSON gives it back as something else, or it is too long; shows the value.
    """
    if isinstance(value, bytes | bytearray):
        plain = {"base64": base64.b64encode(value).decode()}
        size = len(plain["base64"])
    else:
        text = _shallow_json(value, "the result of snapshot")
        if json.loads(text) != value:
            raise TypeError(f"snapshot returned {brief(value)}, which JSON gives back changed (tuples become lists, "
                            "and keys text); return lists, dicts with text as keys, texts, finite numbers, or bytes "
                            "(pickle.dumps)")
        plain = {"json": value}
        size = len(text)
    if size > ANSWER_BYTES:
        raise ValueError(f"snapshot returned {type(value).__name__} of {size} bytes as JSON (bytes are written as "
                         f"base64), and may have {ANSWER_BYTES}")
    return plain


def given_snapshot(plain: Mapping[str, Any]) -> Any:
    """What `restore` is given: the inverse of `plain_snapshot`."""
    return base64.b64decode(plain["base64"]) if "base64" in plain else plain["json"]


def tool_content(result: Any, tool: str) -> str:
    """What a tool returned, as the policy reads it: text as it is, anything else as JSON.

    Raises:
        TypeError, ValueError: it is neither; shows the value.
    """
    written = _json(result, f"the result of the tool `{tool}`")
    return result if isinstance(result, str) else written


def _fields_of(answer: Any, kind: type, who: str, order: tuple[str, ...]) -> Mapping[str, Any]:
    names = [each.name for each in fields(kind)]
    if isinstance(answer, kind):
        return {name: getattr(answer, name) for name in names}
    if isinstance(answer, tuple) and order and len(answer) == len(order):
        return dict(zip(order, answer, strict=True))
    if not isinstance(answer, Mapping):
        tuples = f", or a tuple of {', '.join(order)}" if order else ""
        raise TypeError(f"{who} returned {brief(answer)}; it must return a {kind.__name__}, a dict with its keys "
                        f"({', '.join(names)}){tuples}")
    if other := [key for key in answer if key not in names]:
        raise TypeError(f"{who} returned a dict with the key {brief(other[0])}; the keys of a {kind.__name__} are "
                        f"{', '.join(names)}")
    return answer


def plain_tools(tools: Any, who: str) -> list[dict[str, Any]]:
    """JSON schemas of tools.

    Raises:
        TypeError, ValueError: they are something else; shows the value.
    """
    if not isinstance(tools, list | tuple):
        raise TypeError(f"{who} returned the tools {brief(tools)}, which must be a list of JSON schemas")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise TypeError(f"tool {place} of {who} is {brief(tool)}, which must be a JSON schema with function.name "
                            "(transformers.utils.get_json_schema)")
        _shallow_json(tool, f"tool {place} of {who}")
    return list(tools)


def _flag(value: Any, name: str, who: str) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # numpy's, without importing it
        return bool(value)
    raise TypeError(f"{who} returned {name}={brief(value)}, which must be True or False")


def _numbers(info: Any, who: str) -> dict[str, float]:
    """The finite numbers of `info`; what else is in it does not leave the process."""
    if not isinstance(info, Mapping):
        raise TypeError(f"{who} returned info={brief(info)}, which must be a dict")
    numbers = {str(name).encode(errors="replace").decode(): _number(value) for name, value in info.items()}
    return {name: number for name, number in numbers.items() if number is not None and abs(number) <= LARGEST_REWARD}


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, str | bytes | list | tuple | dict | set):
        return None
    try:
        return float(value)
    except Exception:  # its class is the user's
        return None


def _shallow_json(value: Any, who: str) -> str:
    """As `_json`, of what is sent as it is.

    Raises:
        ValueError: it is nested deeper than `MOST_NESTED`.
    """
    text = _json(value, who)
    if text.count("[") + text.count("{") > MOST_NESTED and _nested_too_deep(value):
        raise _too_deep(value, who)
    return text


def _nested_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_NESTED):
        containers = [each for each in level if isinstance(each, dict | list | tuple)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list | tuple) for each in level)


def _too_deep(value: Any, who: str) -> ValueError:
    return ValueError(f"{who} is {brief(value)}, with more than {MOST_NESTED} lists and dicts within each other; "
                      "return it flatter, or as text")


def _json(value: Any, who: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()  # half of a surrogate pair is no character
        return text
    except RecursionError:
        raise _too_deep(value, who) from None
    except (TypeError, ValueError) as error:
        raise TypeError(f"{who} is {brief(value)}, which JSON cannot hold: {error}") from None
