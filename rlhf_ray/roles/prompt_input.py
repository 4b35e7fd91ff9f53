"""Prompts as people give them: on the command line, in a file, through a pipe; as text or as chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_ray.data.chat import Messages, PromptFormat, PromptText, checked_messages
from rlhf_ray.data.encoding import encode_prompts
from rlhf_ray.data.reading import read_rows
from rlhf_ray.data.rows import checked_text
from rlhf_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """One prompt."""

    asked: str | Messages
    place: str
    """Where it stands, for messages: "prompts.jsonl, line 3"."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row: an answer to check, a label."""


def read_questions(path: str, column: str, limit: int | None = None) -> list[Question]:
    """The prompts of a data file or Hub data set (`column` holds them), or of a text file: a line a prompt.

    Raises:
        DataError: no such file, nothing in it, or a row without that column.
    """
    if Path(path).suffix == ".txt" and Path(path).is_file():
        with Path(path).open(encoding="utf-8") as lines:
            return questions_of_lines(lines, path, column)[:limit]
    rows = replace(read_rows(path, "train", limit), fields={column: "--column"})
    return [Question(rows.value(i, column), rows.place(i), rows.others(i, column)) for i in range(len(rows))]


def questions_of_lines(lines: Iterable[str], source: str, column: str) -> list[Question]:
    """A prompt a line; a line that is a JSON object is a row with its prompt in `column`. Empty lines say nothing.

    Raises:
        DataError: no prompt at all, a row without that column, or what cannot be read as text.
    """
    try:
        questions = [_question(line, f"{source}, line {number}", column)
                     for number, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read as UTF-8 text: {error}") from error
    if not questions:
        raise DataError(f"{source}: no prompt; write one a line")
    return questions


def encode_questions(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, chat: bool
) -> tuple[list[str], list[list[int]], list[Messages | None] | None]:
    """([N] texts as the model sees them, [N] token ids, [N] chat messages, None for a prompt that is a text).

    Messages go through the tokenizer's chat template, and with `chat` texts do too, as a user's turn, where there is a
    template.

    Raises:
        DataError: a question that is neither text nor messages.
        ModelError: messages, and the tokenizer has no chat template.
    """
    form = PromptFormat(tokenizer, "prompt")
    prompts = [_prompt(form, question, chat and bool(tokenizer.chat_template)) for question in questions]
    messages = [prompt.messages for prompt in prompts]
    texts = [prompt.text for prompt in prompts]
    return texts, encode_prompts(tokenizer, prompts), messages if any(messages) else None


def _prompt(form: PromptFormat, question: Question, as_chat: bool) -> PromptText:
    """What the model is given, as the tokenizer will see it."""
    asked, place = question.asked, question.place
    if isinstance(asked, list):
        form.template.require(place, "prompt")
        return form.chat(checked_messages(asked, place, "prompt"), place)
    text = checked_text(asked, place, "prompt")
    return form.chat([{"role": "user", "content": text}], place) if as_chat else PromptText(text, None)


def _question(line: str, place: str, column: str) -> Question:
    if not line.lstrip().startswith("{"):
        return Question(line.rstrip("\r\n"), place)
    try:
        row = json.loads(line)
    except ValueError:
        return Question(line.rstrip("\r\n"), place)  # a text that begins with a brace
    if column not in row:
        raise DataError(f"{place}: no column {column!r}; the row has {sorted(row)}. Name the right one by --column, or "
                        "add it")
    return Question(row[column], place, {name: value for name, value in row.items() if name != column})
