"""Chat messages: their checks, and their rendering by a tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_ray.data.rows import Rows, brief, checked_text
from rlhf_ray.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
"""[{"role": ..., "content": ...}, ...]."""
ASSISTANT = "assistant"
TEMPLATE_OPTIONS = "chat_template_kwargs"
"""Column with options of the chat template, by name, as other trainers have it."""
TOOLS = "tools"
NO_TOOLS: tuple[Any, ...] = (None, [], {}, "", "[]", "null")
"""Values of `tools` without a tool; CSV files and some exports have the texts."""
LOSS_KEYS = ("weight", "train", "training", "loss")
"""Keys by which other trainers say whether a message carries loss: 0 and 1, or false and true."""
TEMPLATE_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
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
    gives every message the keys of all, and a template would write the missing ones.

    Raises:
        DataError: it is not; names the place, the column and what is wrong.
    """
    value = messages_within(value, place, column)
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: column {column!r} must be a list of chat messages like the first row's, "
                        f"not {type(value).__name__ if not isinstance(value, list) else 'an empty list'}")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{place}: column {column!r}: each message must be an object with role and content")
        checked_text(message["role"], place, f"{column}.role")
        checked_text(message["content"], place, f"{column}.content", may_be_empty=True)
    return [_without_none(message) for message in value]


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
    """The options that a row gives the chat template.

    Raises:
        DataError: they are no object; or the row has tools.
    """
    if row.get(TOOLS) not in NO_TOOLS:
        raise DataError(f"{place}: the row has {TOOLS}, which are not supported yet and would be left out of the "
                        "prompt; remove the key, or write the tools into the system message")
    options = row.get(TEMPLATE_OPTIONS) or {}
    if not isinstance(options, dict):
        raise DataError(f"{place}: {TEMPLATE_OPTIONS} must be an object of options by name, not {brief(options)}")
    return {name: value for name, value in options.items() if value is not None}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


NO_OPTIONS: Mapping[str, Any] = {}
OWN_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")
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
            if name in OWN_ARGUMENTS or not _names(source, name):
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

    def _written(self, messages: Messages, place: str, **arguments: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **arguments)
        except Exception as error:  # a template is a program and may raise anything (e.g. "roles must alternate")
            raise ModelError(f"{place}: the tokenizer's chat template refuses the messages, of roles "
                             f"{[m['role'] for m in messages]}: {error}") from error


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
            raise DataError(f"{place}: the row has {TEMPLATE_OPTIONS}, and column {self._column!r} is a text, to "
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
        return PromptText(self.template.render(messages, place, ask=True, options=options), messages, options)


@dataclass(frozen=True)
class PromptText:
    """One prompt."""

    text: str
    """As the tokenizer sees it."""
    messages: Messages | None
    """None for a plain text, to which the tokenizer adds its leading tokens; a template writes them itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template."""


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
