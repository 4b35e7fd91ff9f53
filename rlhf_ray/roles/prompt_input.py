"""Prompts that a user supplies on the command line, in a file or through a pipe, as text or as chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_ray.data.chat import Messages, PromptFormat, PromptText, checked_messages, template_options
from rlhf_ray.data.encoding import encode_prompts
from rlhf_ray.data.row_readers import read_rows
from rlhf_ray.data.rows import checked_text
from rlhf_ray.data.tool_messages import TOOLS
from rlhf_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptInput:
    """One prompt."""

    content: str | Messages
    location: str
    """Where it was read, for messages: "prompts.jsonl, line 3"."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row, such as the correct answer or a label."""


def read_prompt_inputs(path: str, column: str, limit: int | None = None) -> list[PromptInput]:
    """The prompts of a data file or Hub data set (in `column`), or of a text file with one prompt per line.

    Raises:
        DataError: the file is missing or empty, or a row lacks the column.
    """
    if Path(path).suffix == ".txt" and Path(path).is_file():
        with Path(path).open(encoding="utf-8") as lines:
            return prompt_inputs_of_lines(lines, path, column)[:limit]
    rows = replace(read_rows(path, "train", limit), fields={column: "--column"})
    return [PromptInput(rows.value(i, column), rows.place(i), rows.others(i, column)) for i in range(len(rows))]


def prompt_inputs_of_lines(lines: Iterable[str], source: str, column: str) -> list[PromptInput]:
    """One prompt per line. A line that is a JSON object is a row with its prompt in `column`; empty lines are skipped.

    Raises:
        DataError: there is no prompt, a row lacks the column, or the input is not UTF-8 text.
    """
    try:
        prompts = [_parse_line(line, f"{source}, line {number}", column)
                   for number, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} cannot be read as UTF-8 text: {error}. Save it as UTF-8") from error
    if not prompts:
        raise DataError(f"{source}: no prompt; write one per line")
    return prompts


def encode_prompt_inputs(
    prompts: Sequence[PromptInput], tokenizer: PreTrainedTokenizerBase, chat: bool
) -> tuple[list[str], list[list[int]], list[Messages | None] | None]:
    """([N] texts as the model sees them, [N] token ids, [N] chat messages or None for a text prompt).

    Messages go through the tokenizer's chat template. With `chat`, texts do too, as one user turn, if the tokenizer
    has a template. The third value is None if no prompt has messages.

    Raises:
        DataError: a prompt is neither text nor messages.
        ModelError: a prompt has messages, and the tokenizer has no chat template.
    """
    form = PromptFormat(tokenizer, "prompt")
    formatted = [formatted_prompt(form, prompt, chat and bool(tokenizer.chat_template)) for prompt in prompts]
    messages = [prompt.messages for prompt in formatted]
    texts = [prompt.text for prompt in formatted]
    return texts, encode_prompts(tokenizer, formatted), messages if any(messages) else None


def formatted_prompt(form: PromptFormat, prompt: PromptInput, as_chat: bool) -> PromptText:
    """The prompt as the tokenizer receives it."""
    content, location = prompt.content, prompt.location
    options = template_options(prompt.metadata, location)
    if isinstance(content, list):
        form.template.require(location, "prompt")
        return form.chat(checked_messages(content, location, "prompt"), location, options)
    text = checked_text(content, location, "prompt")
    if as_chat:
        return form.chat([{"role": "user", "content": text}], location, options)
    if TOOLS in options:
        raise DataError(f"{location}: the row has {TOOLS}, and the prompt is a text, to which no template is applied; "
                        "write it as messages, or remove the key")
    return PromptText(text, None)


def _parse_line(line: str, location: str, column: str) -> PromptInput:
    if not line.lstrip().startswith("{"):
        return PromptInput(line.rstrip("\r\n"), location)
    try:
        row = json.loads(line)
    except ValueError:
        return PromptInput(line.rstrip("\r\n"), location)  # a text that begins with a brace
    if column not in row:
        raise DataError(f"{location}: no column {column!r}; the row has {sorted(row)}. Name the right one by --column, "
                        "or add it")
    return PromptInput(row[column], location, {name: value for name, value in row.items() if name != column})
