"""Texts to flat token columns: in batches, with or without the tokenizer's own leading tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.rows import Rows, checked_text
from rlhf_ray.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def flat_tokens(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """All tokens of all rows, one after another."""
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=sum(map(len, rows)))


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends a sequence.

    Raises:
        ModelError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer {tokenizer.name_or_path or '(unnamed)'} has no end-of-sequence token, and "
                         "responses could never end; set eos_token in its tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, leading: bool) -> list[list[int]]:
    """[N] lists of token ids, never with an end-of-sequence token added.

    Args:
        leading: add what the tokenizer puts before a text (a beginning-of-sequence token, if it has one).
    """
    if not texts:
        return []
    rows: list[list[int]] = tokenizer(
        texts, add_special_tokens=leading, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    eos = tokenizer.eos_token
    if leading and eos is not None:  # some tokenizers also end every text; a prompt must stay open
        end = tokenizer.eos_token_id
        return [row[:-1] if row and row[-1] == end and not text.endswith(eos) else row
                for row, text in zip(rows, texts, strict=True)]
    return rows


def encode_prompts(rows: Rows, column: str, tokenizer: PreTrainedTokenizerBase, *,
                   may_be_empty: bool = False, chat: bool | None = None) -> tuple[list[str], list[list[int]]]:
    """([N] prompt texts as the tokenizer saw them, [N] token ids) of a column of texts or of chat messages.

    Messages `[{"role": ..., "content": ...}, ...]` go through the tokenizer's chat template, which then asks for the
    assistant's turn; the first row of the data set decides which of the two kinds all rows must be.

    Args:
        chat: whether the first row of the data set held messages; None when it is among these.

    Raises:
        DataError: a row that is neither a text nor messages, or not of the first row's kind.
        ModelError: messages, but the tokenizer has no chat template or the template refuses them.
    """
    if not (holds_messages(rows, column) if chat is None else chat):
        texts = [rows.text(i, column, may_be_empty=may_be_empty) for i in range(len(rows))]
        return texts, encode(tokenizer, texts, leading=True)
    if not tokenizer.chat_template:
        raise ModelError(f"{rows.source}: column {column!r} holds chat messages, but the tokenizer "
                         f"{tokenizer.name_or_path or '(unnamed)'} has no chat template; use texts, or a tokenizer "
                         "with one")
    texts = [_render(tokenizer, _messages(rows, i, column), rows.place(i)) for i in range(len(rows))]
    return texts, encode(tokenizer, texts, leading=False)  # templates write the leading tokens themselves


def holds_messages(rows: Rows, column: str) -> bool:
    """Whether the first row holds chat messages in `column`; otherwise it should be a text."""
    return isinstance(rows.value(0, column), list)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], place: str) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program and raises what it likes (e.g. "roles must alternate")
        raise ModelError(f"{place}: the tokenizer's chat template refuses the messages, of roles "
                         f"{[m['role'] for m in messages]}: {error}") from error


def _messages(rows: Rows, i: int, column: str) -> list[dict[str, Any]]:
    messages, place = rows.value(i, column), rows.place(i)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: column {column!r} must be a list of chat messages like the first row's, "
                        f"not {type(messages).__name__ if not isinstance(messages, list) else 'an empty list'}")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{place}: column {column!r}: each message must be an object with role and content")
        checked_text(message["role"], place, f"{column}.role")
        checked_text(message["content"], place, f"{column}.content", may_be_empty=True)
    return messages
