"""Chat messages: their checks, and their rendering by a tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_ray.data.rows import Rows, brief, checked_text
from rlhf_ray.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
"""[{"role": ..., "content": ...}, ...]."""
ASSISTANT = "assistant"
ANSWER = "(rlhf_ray: an answer)"
"""Stands for an answer, to find what a template writes after it."""


def checked_messages(value: Any, place: str, column: str) -> Messages:
    """`value`, if it is a list of chat messages, without keys whose value is None: parquet gives every message the keys
    of all, and a template would write the missing ones.

    Raises:
        DataError: it is not; names the place, the column and what is wrong.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: column {column!r} must be a list of chat messages like the first row's, "
                        f"not {type(value).__name__ if not isinstance(value, list) else 'an empty list'}")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{place}: column {column!r}: each message must be an object with role and content")
        checked_text(message["role"], place, f"{column}.role")
        checked_text(message["content"], place, f"{column}.content", may_be_empty=True)
    return [_without_none(message) for message in value]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


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

    def turn_end(self, messages: Messages, place: str) -> str:
        """What the template writes after the assistant's answer to these messages.

        Raises:
            ModelError: the template refuses them.
        """
        answered = self.render([*messages, {"role": ASSISTANT, "content": ANSWER}], place, ask=False)
        return answered.rpartition(ANSWER)[2] if ANSWER in answered else ""

    def render(self, messages: Messages, place: str, *, ask: bool) -> str:
        """The messages as text.

        Args:
            ask: end with the beginning of the assistant's turn.

        Raises:
            ModelError: the template refuses them.
        """
        return str(self._apply(messages, place, add_generation_prompt=ask, tokenize=False))

    def marked_tokens(self, messages: Messages, place: str) -> tuple[list[int], list[bool]]:
        """([T] token ids, [T] True on the assistant's text), by the template's own marks."""
        found = self._apply(messages, place, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]

    def turns(self, messages: Messages, place: str) -> list[tuple[str, bool]]:
        """The whole conversation as pieces of text, with True on the assistant's turns.

        A turn is what the rendered text gains when the message is added to those before it.

        Raises:
            DataError: the template writes earlier turns differently once others follow, so no piece of the text is
                the turn.
        """
        pieces, written = [], ""
        for i in (i for i, message in enumerate(messages) if message["role"] == ASSISTANT):
            before = self.render(messages[:i], place, ask=True) if i else ""
            after = self.render(messages[: i + 1], place, ask=False)
            if not (before.startswith(written) and after.startswith(before)):
                raise DataError(
                    f"{place}: with this tokenizer's chat template the assistant's turn {i + 1} is not a part "
                    "of the text: the template renders earlier turns differently once others follow. Mark the "
                    "assistant's text by {% generation %} in the template, or give prompt and response columns")
            pieces += [(before[len(written) :], False), (after[len(before) :], True)]
            written = after
        return pieces

    def _apply(self, messages: Messages, place: str, **options: Any) -> Any:
        if not self.tokenizer.chat_template:
            raise ModelError(f"{place}: chat messages, but {self._no_template}")
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
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
        value, place, as_chat = rows.value(i, self._column), rows.place(i), as_chat or self._as_chat
        if self._messages is None and value is not None:  # which is refused below, and decides nothing
            self._messages = isinstance(value, list)
        if self._messages or as_chat:
            self.template.require(rows.source, self._column)
        if self._messages:
            return self.chat(checked_messages(value, place, self._column), place)
        text = checked_text(value, place, self._column, may_be_empty=self._may_be_empty)
        if self.template.system is not None and not as_chat:
            raise DataError(f"{place}: column {self._column!r} is a text, so system={brief(self.template.system)} has "
                            "no effect; set as_chat to make it a user message, or leave system out")
        return self.chat([{"role": "user", "content": text}], place) if as_chat else PromptText(text, None)

    def chat(self, messages: Messages, place: str) -> PromptText:
        """A prompt of these messages, which ends where the assistant's turn begins.

        Raises:
            DataError: they end with an answer.
            ModelError: the template refuses them.
        """
        if messages[-1]["role"] == ASSISTANT:
            raise DataError(f"{place}: the messages of column {self._column!r} end with the assistant's answer, and a "
                            "prompt ends before it; name a column without the answer, or remove it")
        messages = self.template.with_system(messages)
        return PromptText(self.template.render(messages, place, ask=True), messages)


@dataclass(frozen=True)
class PromptText:
    """One prompt."""

    text: str
    """As the tokenizer sees it."""
    messages: Messages | None
    """None for a plain text, to which the tokenizer adds its leading tokens; a template writes them itself."""


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
