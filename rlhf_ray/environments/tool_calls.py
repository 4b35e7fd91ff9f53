"""What a policy wrote in a turn: content, reasoning and calls of tools, by the format of its model family.

A call that cannot be read is an error in words that help a model to write it right; what only looks like a call is
content. A turn is read and never written again: its ids stay as they were sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_ray.environments.protocol import ToolCall
from rlhf_ray.errors import ConfigError

Tools = Sequence[dict[str, Any]]
"""JSON schemas of functions."""
ExternalParser = Callable[[str, Tools], tuple[str, list[tuple[str, str]]]]
"""Of a text without reasoning, and the tools that may be called in it: (its content, [(name, arguments as JSON text)]
of its calls)."""
THINK, THOUGHT = "<think>", "</think>"
EXAMPLE = '{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}'
EXTERNAL_BY_TEMPLATE = {
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
}
"""Parsers of vLLM by a text in the templates of their families, for "auto"."""


@dataclass
class Parsed:
    """A turn, read."""

    content: str
    """The text without reasoning and calls."""
    reasoning: str = ""
    """What stands in <think> at the beginning."""
    calls: list[ToolCall] = field(default_factory=list)
    """In the order of the text. An id is what the text says, mostly nothing."""
    errors: list[str] = field(default_factory=list)
    """Of calls that cannot be read: what is wrong, and how to write it."""


class ToolCallParser:
    """Reads turns in one format.

    Example:
        >>> parser = ToolCallParser.of("hermes")
        >>> parser.parse('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>').calls
        [ToolCall(name='add', arguments={'a': 1, 'b': 2}, id='')]
    """

    def __init__(self, name: str, read: Callable[[str, Tools], Parsed]) -> None:
        self.name = name
        """Of the format."""
        self._read = read

    @classmethod
    def of(cls, name: str, chat_template: str = "",
           external: Callable[[str], ExternalParser] | None = None) -> ToolCallParser:
        """The parser of a format.

        Args:
            name: "hermes", "llama3", "mistral", "json", another parser's name, or "auto" for `format_of` the template.
            external: gives other parsers by name, such as `rlhf_ray.roles.engines.vllm_tool_calls` does.

        Raises:
            ConfigError: no such format.
        """
        name = format_of(chat_template) if name == "auto" else name
        if name in READERS:
            return cls(name, _own_reader(name))
        if external is None:
            raise ConfigError(f"tool_format={name!r} is not one of {', '.join(['auto', *READERS])}, and no other "
                              "parsers are given here; choose one of these")
        return cls(name, _external_reader(name, external(name)))

    def parse(self, text: str, *, opened: bool = False, tools: Tools = ()) -> Parsed:
        """Read a turn; no text raises an error.

        Args:
            text: all of it, special tokens included, without the token that ended it.
            opened: its prompt ended within <think>.
            tools: that may be called. Some parsers of vLLM read the types of arguments from their schemas.
        """
        reasoning, rest = _reasoning(text, opened)
        parsed = self._read(rest, tools)
        parsed.reasoning = reasoning
        parsed.content = parsed.content.strip()
        return parsed


def format_of(chat_template: str) -> str:
    """The format of calls that a chat template writes, by the tokens in it; "json" if it shows none."""
    for mark, name in EXTERNAL_BY_TEMPLATE.items():
        if mark in chat_template:
            return name
    if "<tool_call>" in chat_template:
        return "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<|python_tag|>" in chat_template or "ipython" in chat_template:
        return "llama3"
    return "json"


def plain_turn(text: str, *, opened: bool = False) -> Parsed:
    """A turn of an episode without tools, in which nothing is a call; as `ToolCallParser.parse`."""
    reasoning, rest = _reasoning(text, opened)
    return Parsed(rest.strip(), reasoning)


def _reasoning(text: str, opened: bool) -> tuple[str, str]:
    """(reasoning at the beginning, what follows it)."""
    begun = text.lstrip()
    if begun.startswith(THINK):
        reasoning, _, rest = begun.removeprefix(THINK).partition(THOUGHT)
        return reasoning.strip(), rest
    before, closed, rest = text.partition(THOUGHT)
    if opened:
        return before.strip(), rest
    if closed and not any(mark in before for mark in (THINK, "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "{")):
        return before.strip(), rest  # the prompt began it
    return "", text


# One call


class _Malformed(ValueError):
    """A call that cannot be read; its message says why."""


def _no_constant(name: str) -> Any:
    raise _Malformed(f"it contains {name}, which is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _value(text: str, begin: int) -> tuple[Any, int]:
    """(the JSON value at this place, where it ends).

    Raises:
        _Malformed: there is none.
    """
    try:
        value, end = DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise _Malformed("it ends before its JSON is complete") from None
        raise _Malformed(f"it is not valid JSON ({error.msg}, character {error.pos - begin + 1})") from None
    except UnicodeEncodeError:
        raise _Malformed("it contains an escape that is no character, such as \\ud800") from None
    except RecursionError:
        raise _Malformed("its JSON is nested too deeply") from None
    except _Malformed:
        raise
    except ValueError as error:  # a number of too many digits
        raise _Malformed(f"it is not valid JSON ({error})") from None
    return value, end


def _call(value: Any, *keys: str) -> ToolCall:
    """The call that an object describes, with its arguments under the first of these keys that it has.

    Raises:
        _Malformed: it describes none.
    """
    if not isinstance(value, dict):
        raise _Malformed(f"it is {_kind(value)}, not an object")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _Malformed('it has no "name", which is the name of the tool as a string')
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise _Malformed(f'it has no "{keys[0]}"; write {{}} for a tool without arguments')
    arguments = value[key]
    if not isinstance(arguments, dict):
        raise _Malformed(f'its "{key}" is {_kind(arguments)}, not an object of arguments by name')
    identity = value.get("id")
    return ToolCall(name.strip(), arguments, identity if isinstance(identity, str) else "")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _sentence(reason: object, example: str) -> str:
    return f"The tool call cannot be read: {reason}. Write it as {example}"


# Formats

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"


def _read_hermes(text: str) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them; the end may be missing at the end
    of the text, as a stop string leaves it out."""
    parsed = Parsed("")
    at = 0
    while (begin := text.find(CALL_BEGIN, at)) >= 0:
        parsed.content += text[at:begin]
        inner = _skip_blanks(text, begin + len(CALL_BEGIN))
        closed = text.find(CALL_END, inner)
        following = text.find(CALL_BEGIN, inner)
        if not text.startswith("{", inner) and (closed < 0 or 0 <= following < closed):
            parsed.content += text[begin:inner]  # the tag alone, as a sentence about tags has it
            at = inner
            continue
        try:
            value, end = _value(text, inner)
            after = _skip_blanks(text, end)
            if after < len(text) and not text.startswith(CALL_END, after):
                raise _Malformed(f"{text[after : after + 20]!r} follows the JSON object, where {CALL_END} belongs")
            at = min(len(text), after + len(CALL_END))
            parsed.calls.append(_call(value, "arguments"))
        except _Malformed as error:
            parsed.errors.append(_sentence(error, f"{CALL_BEGIN}\n{EXAMPLE}\n{CALL_END}"))
            if at <= begin:
                closed = text.find(CALL_END, inner)
                ends = [place for place in (closed + len(CALL_END) if closed >= 0 else -1,
                                            text.find(CALL_BEGIN, inner)) if place >= 0]
                at = min(ends, default=len(text))
    parsed.content += text[at:]
    return parsed


PYTHON_TAG = "<|python_tag|>"
LLAMA_EXAMPLE = EXAMPLE.replace("arguments", "parameters")
AT_LINE = re.compile(r"^[ \t]*(?=\{)", re.MULTILINE)
AT_LINE_OR_LIST = re.compile(r"^[ \t]*(?=[\[{])", re.MULTILINE)
SEPARATOR = re.compile(r"\s*;\s*(?=\{)")
NAMED = re.compile(r'[\[{\s]*"name"\s*:')
OBJECTS = re.compile(r'\[?\s*\{\s*"')
FENCE = re.compile(r"```(?:json)?[ \t]*\n(\s*)$")


def _read_llama(text: str) -> Parsed:
    """{"name": ..., "parameters": {...}}, several divided by semicolons, after <|python_tag|> or at the beginning of a
    line."""
    parsed = Parsed("")
    before, tag, after = text.partition(PYTHON_TAG)
    if tag:
        begin = _skip_blanks(after, 0)
        parsed.content = before
        if not after.startswith("{", begin):
            parsed.errors.append(_sentence(f"{PYTHON_TAG} is not followed by a JSON object", LLAMA_EXAMPLE))
            return parsed
        parsed.content += _bare(after, AT_LINE, ("parameters", "arguments"), LLAMA_EXAMPLE, parsed, surely=True)
        return parsed
    parsed.content = _bare(text, AT_LINE, ("parameters", "arguments"), LLAMA_EXAMPLE, parsed)
    return parsed


def _read_json(text: str) -> Parsed:
    """{"name": ..., "arguments": {...}} or a list of such objects, at the beginning of a line, with or without a fence
    around it."""
    parsed = Parsed("")
    parsed.content = _bare(text, AT_LINE_OR_LIST, ("arguments", "parameters"), EXAMPLE, parsed)
    return parsed


def _bare(text: str, places: re.Pattern[str], keys: tuple[str, ...], example: str, parsed: Parsed, *,
          surely: bool = False) -> str:
    """What is left of a text without the calls in it, which are added to `parsed`.

    Args:
        surely: the first JSON is a call, whatever it is; others are if they have a name and arguments.
    """
    content: list[str] = []
    at = 0
    while found := places.search(text, at):
        begin = found.end()
        if not surely and not OBJECTS.match(text, begin):
            content.append(text[at : begin + 1])
            at = begin + 1
            continue
        try:
            value, end = _value(text, begin)
        except _Malformed as error:
            if surely or NAMED.match(text, begin):
                parsed.errors.append(_sentence(error, example))
                return "".join([*content, text[at : found.start()]])
            line = text.find("\n", begin)
            line = len(text) if line < 0 else line
            content.append(text[at:line])
            at = line
            continue
        values = value if isinstance(value, list) else [value]
        if not values or not (surely or all(_looks_like_call(each, keys) for each in values)):
            content.append(text[at:end])
            at = end
            continue
        surely = False
        for each in values:
            try:
                parsed.calls.append(_call(each, *keys))
            except _Malformed as error:
                parsed.errors.append(_sentence(error, example))
        before = text[at : found.start()]
        if fence := FENCE.search(before):
            closing = re.compile(r"\s*```").match(text, end)
            before = before[: fence.start()]
            end = closing.end() if closing else end
        content.append(before)
        at = end
        if separated := SEPARATOR.match(text, end):
            text = text[: separated.start()] + "\n" + text[separated.end() :]
            at = separated.start()
    return "".join([*content, text[at:]])


def _looks_like_call(value: Any, keys: tuple[str, ...]) -> bool:
    """Whether an object has a name, and arguments or nothing else: other objects may be an answer."""
    if not isinstance(value, dict) or "name" not in value:
        return False
    return any(key in value for key in keys) or len(value) == 1


MISTRAL_TAG = "[TOOL_CALLS]"
MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
MISTRAL_EXAMPLE = f"{MISTRAL_TAG} [{EXAMPLE}]"


def _read_mistral(text: str) -> Parsed:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...], or [TOOL_CALLS]name[ARGS]{...}, repeated."""
    before, *parts = text.split(MISTRAL_TAG)
    parsed = Parsed(before)
    for part in parts:
        begin = _skip_blanks(part, 0)
        try:
            if named := MISTRAL_NAME.match(part):
                arguments, end = _value(part, named.end())
                parsed.calls.append(_call({"name": named[1], "arguments": arguments, "id": named[2]}, "arguments"))
            elif part.startswith(("[", "{"), begin):
                value, end = _value(part, begin)
                for each in value if isinstance(value, list) else [value]:
                    try:
                        parsed.calls.append(_call(each, "arguments"))
                    except _Malformed as error:
                        parsed.errors.append(_sentence(error, MISTRAL_EXAMPLE))
            else:
                raise _Malformed(f"{MISTRAL_TAG} is not followed by a list of calls")
            parsed.content += part[end:]
        except _Malformed as error:
            parsed.errors.append(_sentence(error, MISTRAL_EXAMPLE))
    return parsed


READERS: dict[str, Callable[[str], Parsed]] = {
    "hermes": _read_hermes, "llama3": _read_llama, "mistral": _read_mistral, "json": _read_json}


def _own_reader(name: str) -> Callable[[str, Tools], Parsed]:
    def read(text: str, tools: Tools) -> Parsed:
        return READERS[name](text)

    return read


def _external_reader(name: str, parser: ExternalParser) -> Callable[[str, Tools], Parsed]:
    def read(text: str, tools: Tools) -> Parsed:
        try:
            content, calls = parser(text, tools)
        except Exception as error:  # a parser of a library, given a text that it was not written for
            return Parsed(text, errors=[f"The tool call cannot be read by the parser {name}: {error}. Write it as the "
                                        "tools' description says"])
        parsed = Parsed(content)
        for called, arguments in calls:
            try:
                value, _ = _value(arguments, _skip_blanks(arguments, 0))
                parsed.calls.append(_call({"name": called, "arguments": value}, "arguments"))
            except _Malformed as error:
                parsed.errors.append(f"The arguments of the call of {called!r} cannot be read: {error}. Give them as "
                                     "the tools' description says")
        return parsed

    return read


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
