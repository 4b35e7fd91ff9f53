"""What both APIs have in common: a body's JSON, the fields of a request by what they do, texts and tools.

Sampling is the run's. A field of a request therefore acts, is overridden by the run and counted, is ignored, or is
refused, because the answer would be something else than it asks for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhf_ray.gateway.chat import ChatRequest, Refused
from rlhf_ray.user_code.loading import brief

MOST_NESTED = 100
"""Objects and lists within each other in a tool's schema or in arguments, as in what environments return."""
MOST_NAMED = 64
"""Characters of a field's name in warnings."""
TEXT_SEPARATOR = "\n"
"""Between the text parts of one message, as vLLM 0.32 joins them (vllm/renderers/chat_utils.py)."""
PIECE = re.compile(r".{1,48}(?:\s|$)|.{1,48}", re.DOTALL)
"""What an event of a stream carries of a finished text."""

OWN_TOKENS = "the policy's tokens must follow the run's distribution"
"""Why what would constrain them is refused, in both APIs."""


@dataclass(frozen=True)
class Asked:
    """A request's body, read."""

    request: ChatRequest
    stream: bool
    overridden: list[str]
    """Fields that the run's sampling replaced."""
    ignored: list[str]
    """Fields without effect: of the request, or "messages[].NAME", "tools[].NAME"."""
    show_usage: bool = False
    """OpenAI's streams end with the number of tokens."""
    show_reasoning: bool = False
    """Anthropic's answers have a block with the reasoning."""


def refuse(message: str) -> NoReturn:
    """A definite refusal, which clients do not retry.

    Raises:
        Refused: status 400.
    """
    raise Refused(400, message)


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a body.

    Raises:
        Refused: status 400; it is not UTF-8, not JSON (NaN and Infinity are not), nested too deeply, or no object.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        refuse(f"the body is not UTF-8 (byte {error.start})")
    except RecursionError:
        refuse("the body's JSON is nested too deeply")
    except ValueError as error:  # also a number of too many digits
        refuse(f"the body is not JSON: {error}")
    if not isinstance(value, dict):
        refuse(f"the body is {_kind(value)}, and must be a JSON object")
    return value


def sort_fields(body: Mapping[str, Any], acts: Collection[str], overridden: Collection[str],
                refused: Mapping[str, tuple[Collection[Any], str]]) -> tuple[list[str], list[str]]:
    """(fields that the run overrides, fields without effect) of those that the body gives; null is not given.

    Args:
        refused: by field, the values that ask for nothing, and why others are refused.

    Raises:
        Refused: status 400; names the field, its value and the reason.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, (harmless, reason) in refused.items():
        # By type too: 1 == True.
        if name in given and not any(given[name] == each and type(given[name]) is type(each) for each in harmless):
            refuse(f"{name}={brief(given[name])} is refused: {reason}")
    replaced = [name for name in given if name in overridden]
    ignored = [name for name in given if name not in acts and name not in overridden and name not in refused]
    return replaced, ignored


def list_of_objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects, unchanged.

    Raises:
        Refused: status 400; it is something else.
    """
    if not isinstance(value, list):
        refuse(f"{where} is {_kind(value)}, and must be a list of objects")
    for place, each in enumerate(value):
        if not isinstance(each, dict):
            refuse(f"{where}[{place}] is {_kind(each)}, and must be an object")
    return value


def text(value: Any, where: str) -> str:
    """A text, unchanged.

    Raises:
        Refused: status 400; it is something else, or has half a surrogate pair, which no tokenizer reads.
    """
    if not isinstance(value, str):
        refuse(f"{where} is {_kind(value)}, and must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(f"{where} contains an escape that is no character, such as \\ud800")
    return value


def flag(value: Any, where: str) -> bool:
    """True or false; null is false.

    Raises:
        Refused: status 400; it is something else.
    """
    if value is not None and not isinstance(value, bool):
        refuse(f"{where} is {brief(value)}, and must be true or false")
    return bool(value)


def token_limit(value: Any, where: str) -> int | None:
    """A positive number of tokens, or None where it is null.

    Raises:
        Refused: status 400; it is something else.
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(f"{where} is {brief(value)}, and must be a positive integer")
    return value


def stop_texts(value: Any, where: str, most: int) -> tuple[str, ...]:
    """Texts that end the turn: of a list of at most `most`, a single one, or null.

    Raises:
        Refused: status 400; it is something else.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or len(value) > most or not all(isinstance(each, str) and each for each in value):
        refuse(f"{where} is {brief(value)}, and must be at most {most} strings that are not empty")
    return tuple(text(each, where) for each in value)


def plain(value: Any, where: str) -> Any:
    """A JSON value that chat templates write as it is, unchanged.

    Raises:
        Refused: status 400; it is nested deeper than `MOST_NESTED`, or contains what JSON cannot write again.
    """
    level = [value]
    for _ in range(MOST_NESTED + 1):
        if not level:
            return value
        level = [inner for each in level for inner in _inner(each, where)]
    refuse(f"{where} has more than {MOST_NESTED} lists and objects within each other")


def _inner(value: Any, where: str) -> Iterator[Any]:
    if isinstance(value, str):
        text(value, f"a string in {where}")
    elif isinstance(value, float) and not math.isfinite(value):
        refuse(f"a number in {where} is larger than a float")
    elif isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def function_tool(function: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool's schema as chat templates take it; fields other than name, description and parameters stay in it, as the
    "return" of `transformers.utils.get_json_schema`.

    Raises:
        Refused: status 400; names the part.
    """
    if not text(function.get("name"), f"{where}.name"):
        refuse(f"{where}.name is empty")
    if function.get("description") is not None:
        text(function["description"], f"{where}.description")
    if not isinstance(function.get("parameters"), dict | None):
        refuse(f"{where}: the schema of its arguments is {_kind(function['parameters'])}, and must be an object")
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": plain(given, where)}


def arguments_of(written: str, where: str) -> dict[str, Any] | str:
    """The arguments of a call that a message of the assistant repeats: an object, or the text if it is no JSON object.

    Raises:
        Refused: status 400; the object cannot be written again.
    """
    try:
        value = json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return written
    return plain(value, where) if isinstance(value, dict) else written


def call_arguments(arguments: Mapping[str, Any]) -> str:
    """A call's arguments as the JSON that a client parses."""
    return json.dumps(arguments, ensure_ascii=False)


def pieces(finished: str) -> list[str]:
    """A text in parts of at most 48 characters, cut after white space where there is some."""
    return PIECE.findall(finished)


def shown_field(name: str) -> str:
    """A field's name in a warning: an agent may write anything there."""
    return name[:MOST_NAMED].encode("ascii", "backslashreplace").decode().replace("\n", "\\n")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
