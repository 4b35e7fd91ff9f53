"""Chat messages: their checks, and their rendering by a tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlhf_ray.data.rows import Rows, brief, checked_text
from rlhf_ray.data.tool_messages import (
    TOOL,
    TOOL_CALLS,
    TOOLS,
    checked_calls,
    checked_tools,
    with_arguments_as_texts,
    without_none,
)
from rlhf_ray.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
"""[{"role": ..., "content": ...}, ...]."""
ASSISTANT = "assistant"
TEMPLATE_OPTIONS = "chat_template_kwargs"
"""Column with options of the chat template, by name, as other trainers have it."""
LOSS_KEYS = ("weight", "train", "training", "loss")
"""Keys by which other trainers say whether a message carries loss: 0 and 1, or false and true."""
TEMPLATE_KEYS = (TOOL_CALLS, "reasoning_content", "reasoning", "thinking")
"""Keys of messages with text that only some templates write."""
LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")


def messages_within(value: Any, place: str, column: str) -> Any:
    """`value`, or the messages that it is the JSON text of, as CSV files and some exports have them.

    Raises:
        DataError: a text that looks like messages, but is not JSON.
    """
    if not isinstance(value, str) or not LIST_OF_OBJECTS.match(value):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        if LOOKS_LIKE_MESSAGES.match(value):
            raise DataError(f"{place}: column {column!r} looks like chat messages written as a text, but is not JSON "
                            f"({brief(value)}); write a list of objects with role and content") from None
        return value
    objects = [each.keys() if isinstance(each, dict) else set() for each in parsed]
    speak = all({"role", "from"} & keys for keys in objects)
    say = any({"role", "content"} <= keys or {"from", "value"} <= keys for keys in objects)
    return parsed if speak and say else value


def checked_response(value: Any, place: str, column: str, *, may_be_empty: bool = False) -> str:
    """`value`, if it is a usable text and not the JSON text of messages.

    Raises:
        DataError: it is not; names the place, the column and what is wrong.
    """
    text = checked_text(value, place, column, may_be_empty=may_be_empty)
    if messages_within(text, place, column) is not text:
        raise DataError(f"{place}: column {column!r} holds chat messages written as a text, where a plain text is "
                        "read; name it as a column of messages (data.messages), or give the answer's text")
    return text


def checked_messages(value: Any, place: str, column: str) -> Messages:
    """`value`, if it is a list of chat messages or the JSON text of one, without keys whose value is None: parquet
    gives every message the keys of all, and a template would write the missing ones. Tool calls have the form of
    `checked_calls`, and a message of the assistant that only calls tools has the content "".

    Raises:
        DataError: it is not; names the place, the column and what is wrong.
    """
    value = messages_within(value, place, column)
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: column {column!r} must be a list of chat messages like the first row's, "
                        f"not {type(value).__name__ if not isinstance(value, list) else 'an empty list'}")
    for message in value:
        calls = isinstance(message, dict) and message.get(TOOL_CALLS)
        if not isinstance(message, dict) or not {"role", *(() if calls else ("content",))} <= message.keys():
            sharegpt = isinstance(message, dict) and {"from", "value"} <= message.keys()
            fix = "; rename ShareGPT's from and value, and its human and gpt to user and assistant" if sharegpt else ""
            raise DataError(f"{place}: column {column!r}: each message must be an object with role and content{fix}")
        checked_text(message["role"], place, f"{column}.role")
        if not calls or message.get("content") is not None:
            checked_text(message["content"], place, f"{column}.content", may_be_empty=True)
    return [_in_one_form(message, place, column) for message in value]


def _in_one_form(message: dict[str, Any], place: str, column: str) -> dict[str, Any]:
    """A message as templates read it."""
    message = without_none(message)
    if not message.get(TOOL_CALLS):
        return message
    if message["role"] != ASSISTANT:
        raise DataError(f"{place}: column {column!r}: a message of the role {message['role']!r} has {TOOL_CALLS}, and "
                        f"only the {ASSISTANT} calls tools; remove the key")
    return {"content": "", **message, TOOL_CALLS: checked_calls(message[TOOL_CALLS], place, column)}


def carries_loss(message: Mapping[str, Any], place: str, column: str) -> bool:
    """Whether a message of the assistant is to be learned, by the key that says so, if it has one.

    Raises:
        DataError: a value other than 0, 1, false and true.
    """
    for key in LOSS_KEYS:
        if key in message:
            if message[key] not in (0, 1):
                raise DataError(f"{place}: column {column!r}: a message has {key}={message[key]!r}, and a message "
                                "counts fully or not at all; write 0 or 1, or remove the key")
            return bool(message[key])
    return True


def template_options(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The options that a row gives the chat template, with its tools as `tools`.

    Raises:
        DataError: they are no object; or the tools are no list of JSON schemas.
    """
    options = row.get(TEMPLATE_OPTIONS) or {}
    if not isinstance(options, dict):
        raise DataError(f"{place}: {TEMPLATE_OPTIONS} must be an object of options by name, not {brief(options)}")
    given = {name: value for name, value in options.items() if value is not None}
    if TOOLS in given:
        raise DataError(f"{place}: {TEMPLATE_OPTIONS} has {TOOLS!r}; write them into a column {TOOLS!r} of the row")
    return {**given, **tools_of(row, place)}


def tools_of(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The tools of a row, as an option of a chat template; {} without any. Raises as `checked_tools`."""
    tools = checked_tools(row.get(TOOLS), place)
    return {TOOLS: tools} if tools else {}


NO_OPTIONS: Mapping[str, Any] = {}
OWN_ARGUMENTS = ("messages", "documents", "add_generation_prompt", "continue_final_message", "tokenize")
"""Names that are not options of a template."""


def _names(source: str, name: str) -> bool:
    """Whether a template has this word."""
    return bool(re.search(rf"\b{re.escape(name)}\b", source))


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        system: message put before chats that begin without one.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None

    def require(self, source: str, column: str) -> None:
        """Check that there is a template.

        Raises:
            ModelError: there is none, but `column` holds chat messages.
        """
        if not self.tokenizer.chat_template:
            raise ModelError(f"{source}: column {column!r} holds chat messages, but {self._no_template}")

    @property
    def _no_template(self) -> str:
        return (f"the tokenizer {self.tokenizer.name_or_path or '(unnamed)'} has no chat template; use texts, or a "
                "tokenizer with one")

    @property
    def marks_generation(self) -> bool:
        """Whether it marks the assistant's text by {% generation %}."""
        return bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(self.tokenizer.chat_template)))

    def with_system(self, messages: Messages) -> Messages:
        """The messages, with the configured system message before them if they have none."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def render(self, messages: Messages, place: str, *, ask: bool, options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """The messages as text.

        Args:
            ask: end with the beginning of the assistant's turn.
            options: of the template, by name.

        Raises:
            ModelError: the template refuses them.
            DataError: it would ignore an option, or a key of a message.
        """
        return str(self._apply(messages, place, options, add_generation_prompt=ask, tokenize=False))

    def marked_tokens(
        self, messages: Messages, place: str, options: Mapping[str, Any] = NO_OPTIONS
    ) -> tuple[list[int], list[bool]]:
        """([T] token ids, [T] True on the assistant's text), by the template's own marks."""
        found = self._apply(messages, place, options, tokenize=True, return_dict=True,
                            return_assistant_tokens_mask=True)
        return list(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]

    def _apply(self, messages: Messages, place: str, options: Mapping[str, Any], **arguments: Any) -> Any:
        if not self.tokenizer.chat_template:
            raise ModelError(f"{place}: chat messages, but {self._no_template}")
        source = str(self.tokenizer.chat_template)
        for name in options:
            if name in OWN_ARGUMENTS or (name != TOOLS and not _names(source, name)):
                raise DataError(f"{place}: {TEMPLATE_OPTIONS} has {name!r}, which the tokenizer's chat template does "
                                "not read; remove it")
        written = self._written(messages, place, **options, **arguments)
        for key in TEMPLATE_KEYS:
            if any(message.get(key) for message in messages) and not _names(source, key):
                others = [{name: value for name, value in message.items() if name != key} for message in messages]
                if self._written(others, place, **options, **arguments) == written:
                    raise DataError(f"{place}: a message has {key}, which the tokenizer's chat template leaves out; "
                                    "write it into the content, or remove the key")
        return written

    def require_tools(self, messages: Messages, place: str, options: Mapping[str, Any]) -> None:
        """Check that the template writes a row's tools, and what tools answered.

        Raises:
            DataError: it leaves out either.
            ModelError: it refuses the messages.
        """
        results = any(message["role"] == TOOL and message["content"] for message in messages)
        if TOOLS not in options and not results:
            return
        written = self.render(messages, place, ask=False, options=options)
        others = {name: value for name, value in options.items() if name != TOOLS}
        if TOOLS in options and self.render(messages, place, ask=False, options=others) == written:
            raise DataError(f"{place}: the row has {TOOLS}, which the tokenizer's chat template leaves out; use a "
                            "template that writes them, or write them into the system message and remove the key")
        emptied = [{**message, "content": ""} if message["role"] == TOOL else message for message in messages]
        if results and self.render(emptied, place, ask=False, options=options) == written:
            raise DataError(f"{place}: a message has the role {TOOL!r}, which the tokenizer's chat template leaves "
                            "out; use a template that writes it, or give the message the role user")

    def _written(self, messages: Messages, place: str, **arguments: Any) -> Any:
        if any(TOOL_CALLS in message for message in messages) and _wants_texts(self.tokenizer):
            messages = with_arguments_as_texts(messages)
        try:
            return self.tokenizer.apply_chat_template(messages, **arguments)
        except Exception as error:  # a template is a program and may raise anything (e.g. "roles must alternate")
            raise ModelError(f"{place}: the tokenizer's chat template refuses the messages, of roles "
                             f"{[m['role'] for m in messages]}: {error}") from error


EXAMPLE_CALL: Messages = [
    {"role": "user", "content": "?"},
    {"role": ASSISTANT, "content": "", TOOL_CALLS: [
        {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"rlhf_ray": "x"}}}]},
]


def _wants_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes the arguments of a tool call right only if they are a text: it refuses an
    object, or writes it in Python's form."""
    return _refuses_objects(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _refuses_objects(tokenizer: PreTrainedTokenizerBase, source: str) -> bool:
    """As `_wants_texts`; `source` is the template's, which may be replaced."""
    if not _names(source, TOOL_CALLS):
        return False
    written = _written_or_none(tokenizer, EXAMPLE_CALL)
    if written is None:
        return _written_or_none(tokenizer, with_arguments_as_texts(EXAMPLE_CALL)) is not None
    return "{'rlhf_ray'" in written


def _written_or_none(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is a program and may raise anything
        return None


class PromptFormat:
    """Reads prompts out of rows: texts, or chat messages, whichever the data set's first row has.

    Args:
        as_chat: take a text for a user's message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, column: str, *, system: str | None = None,
                 as_chat: bool = False, may_be_empty: bool = False) -> None:
        self.template = ChatTemplate(tokenizer, system)
        self._column, self._as_chat, self._may_be_empty = column, as_chat, may_be_empty
        self._messages: bool | None = None

    def read(self, rows: Rows, i: int, *, as_chat: bool = False) -> PromptText:
        """The prompt of row i.

        Args:
            as_chat: take a text of this row for a user's message.

        Raises:
            DataError: it is neither a text nor messages, not of the first row's kind, or a text that a system message
                cannot be put before.
            ModelError: messages, but the tokenizer has no chat template or the template refuses them.
        """
        place, as_chat = rows.place(i), as_chat or self._as_chat
        value = messages_within(rows.value(i, self._column), place, self._column)
        if self._messages is None and value is not None:  # which is refused below, and decides nothing
            self._messages = isinstance(value, list)
        if self._messages or as_chat:
            self.template.require(rows.source, self._column)
        options = template_options(rows.records[i], place)
        if self._messages:
            return self.chat(checked_messages(value, place, self._column), place, options)
        text = checked_text(value, place, self._column, may_be_empty=self._may_be_empty)
        if self.template.system is not None and not as_chat:
            raise DataError(f"{place}: column {self._column!r} is a text, so system={brief(self.template.system)} has "
                            "no effect; set as_chat to make it a user message, or leave system out")
        if options and not as_chat:
            key = TOOLS if TOOLS in options else TEMPLATE_OPTIONS
            raise DataError(f"{place}: the row has {key}, and column {self._column!r} is a text, to "
                            "which no template is applied; set as_chat to make it a user message, or remove the key")
        return self.chat([{"role": "user", "content": text}], place, options) if as_chat else PromptText(text, None)

    def chat(self, messages: Messages, place: str, options: Mapping[str, Any] = NO_OPTIONS) -> PromptText:
        """A prompt of these messages, which ends where the assistant's turn begins.

        Raises:
            DataError: they end with an answer.
            ModelError: the template refuses them.
        """
        if messages[-1]["role"] == ASSISTANT:
            raise DataError(f"{place}: the messages of column {self._column!r} end with the assistant's answer, and a "
                            "prompt ends before it; name a column without the answer, or remove it")
        messages = self.template.with_system(messages)
        self.template.require_tools(messages, place, options)
        return PromptText(self.template.render(messages, place, ask=True, options=options), messages, options)


@dataclass(frozen=True)
class PromptText:
    """One prompt."""

    text: str
    """As the tokenizer sees it."""
    messages: Messages | None
    """None for a plain text, to which the tokenizer adds its leading tokens; a template writes them itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, with the row's tools as `tools`."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The row's tools, as JSON schemas; [] without any."""
        return list(self.options.get(TOOLS, []))


def identity(text: str, messages: Messages | None, system: str | None) -> str:
    """What makes two prompts the same: the row's text or messages, of which a single one of a user is its text. Neither
    `system`, which is put before the messages, nor what the template writes around them, which may be the date, is part
    of it."""
    if messages is None:
        return text
    own = messages[1:] if system is not None and messages[0] == {"role": "system", "content": system} else messages
    alone = len(own) == 1 and own[0].keys() == {"role", "content"} and own[0]["role"] == "user"
    return str(own[0]["content"]) if alone else json.dumps(own, sort_keys=True, default=str)


def contents(messages: Sequence[dict[str, Any]]) -> str:
    """The contents of messages, without the template."""
    return "\n".join(str(message["content"]) for message in messages)
