"""Tools of a row and tool calls of a message, in the one form that chat templates read: OpenAI's, with `function`, and
with arguments as an object. Data sets have them in several others."""

from __future__ import annotations

import json
from typing import Any

from rlhf_ray.data.rows import brief
from rlhf_ray.errors import DataError

TOOLS = "tools"
"""Column with the tools of a row, and the name by which a chat template reads them."""
NO_TOOLS: tuple[Any, ...] = (None, [], {}, "", "[]", "null")
"""Values of `tools` without a tool; CSV files and some exports have the texts."""
TOOL_CALLS = "tool_calls"
TOOL = "tool"
"""The role of a tool's result."""


def without_none(value: Any) -> Any:
    """`value` without keys whose value is None, at any depth: parquet gives every object the keys of all."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def checked_tools(value: Any, place: str) -> list[dict[str, Any]]:
    """The tools of a row as JSON schemas: [{"type": "function", "function": {"name": ..., ...}}, ...], as
    `transformers.utils.get_json_schema` writes them.

    Args:
        value: a list of such schemas, or of what stands under `function`; or the JSON text of a list.

    Raises:
        DataError: it is neither; names the place.
    """
    if value in NO_TOOLS:
        return []
    listed = _parsed(value) if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise DataError(f"{place}: {TOOLS} must be a list of JSON schemas, or its JSON text, not {brief(value)}")
    return [_function(without_none(tool), place, f"a tool of {TOOLS}") for tool in listed]


def checked_calls(value: Any, place: str, column: str) -> list[dict[str, Any]]:
    """The tool calls of a message: [{"type": "function", "function": {"name": ..., "arguments": {...}}}, ...], with
    `id` where there is one.

    Args:
        value: a list of such calls, or of what stands under `function`; the arguments as an object or its JSON text.

    Raises:
        DataError: it is something else; names the place.
    """
    if not isinstance(value, list):
        raise DataError(f"{place}: column {column!r}: {TOOL_CALLS} must be a list of calls, not {brief(value)}")
    calls = []
    for each in value:
        call = _function(each, place, f"column {column!r}: a call of {TOOL_CALLS}")
        arguments = call["function"].get("arguments")
        parsed = _parsed(arguments or "{}") if isinstance(arguments or "", str) else arguments
        if not isinstance(parsed, dict):
            raise DataError(f"{place}: column {column!r}: the arguments of a call of {call['function']['name']!r} must "
                            f"be an object, or its JSON text, not {brief(arguments)}")
        calls.append({**call, "function": {**call["function"], "arguments": parsed}})
    return calls


def with_arguments_as_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have their arguments as JSON texts, as a few templates read them."""
    return [{**message, TOOL_CALLS: [_with_text(call) for call in message[TOOL_CALLS]]}
            if message.get(TOOL_CALLS) else message for message in messages]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _function(value: Any, place: str, what: str) -> dict[str, Any]:
    """A tool or a call with `type` and `function`."""
    whole = value if isinstance(value, dict) and "function" in value else {"function": value}
    function = whole["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{place}: {what} must be an object with a name, or have one under 'function', not "
                        f"{brief(value)}")
    return {"type": "function", **whole}


def _parsed(text: str) -> Any:
    """What a text is the JSON of; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
