"""Demonstrations for supervised fine-tuning: whole texts, prompts with responses, or whole conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.data.answers import AnswerFormat, TurnEnds, turns_with_loss
from rlhf_ray.data.chat import (
    ASSISTANT,
    ChatTemplate,
    Messages,
    PromptFormat,
    carries_loss,
    checked_messages,
    checked_response,
    template_options,
)
from rlhf_ray.data.encoding import Encoded, Piece, begins_already, encode_pieces
from rlhf_ray.data.found_columns import USUAL, columns_found, in_words, with_found_columns
from rlhf_ray.data.load_report import LoadReport, RowErrors
from rlhf_ray.data.row_readers import usable_blocks
from rlhf_ray.data.rows import Rows
from rlhf_ray.data.supervised_records import Sequences, sequences_of
from rlhf_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LOSS = "no message of the assistant carries loss"


def load_demonstrations(config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase,
                        row_errors: RowErrors | None = None,
                        model: ModelConfig | NewModelConfig | None = None) -> tuple[Sequences, LoadReport]:
    """Token sequences of one data set in file order, each ended by a token that ends a response, and a report of the
    rows left out (longer ones, and conversations without a token that carries loss).

    All tokens of a plain text carry loss; of a prompt with a response, the response's and the final token do; of a
    conversation, those of the assistant's turns.

    Args:
        config: a section that is not a mix. Columns that it does not name are found, see `found_columns`.
        row_errors: collects malformed rows; None raises an error instead.
        model: as in `named_stop_tokens`.

    Raises:
        DataError: a file or rows that cannot be used (named), or no row left.
        ModelError: no end-of-sequence token, or chat messages without a template.
    """
    row_errors = row_errors or RowErrors()
    config = with_found_columns(config)
    form = DemonstrationFormat(config, tokenizer, model)
    report, blocks, shortest = LoadReport(config.location, already=form.already), [], np.inf
    for rows, values in usable_blocks(config, row_errors, form.read):
        report.form = report.form or _form(config, rows.records[0])
        sequences = sequences_of(form.encode(values))
        shortest = min(shortest, sequences.lengths.min())
        kept = report.keep(rows, {
            NO_LOSS: sequences.lengths == 0,
            f"longer than max_tokens={config.max_tokens}": sequences.lengths > config.max_tokens})
        blocks.append(sequences if len(kept) == len(rows) else sequences.select(kept))
    row_errors.finish(report, f"The shortest row has {shortest} tokens; raise max_tokens or shorten the texts")
    return Sequences.concat([sequences_of([]), *blocks]), report


def _form(config: DemonstrationsConfig, row: Mapping[str, Any]) -> str:
    """The format that is read, in words, and the columns of others that are not."""
    others = sorted(USUAL & row.keys() - set(config.named_columns.values()))
    return in_words(config.named_columns) + (f", not {' nor '.join(others)}" if others else "")


class DemonstrationFormat:
    """How the columns of one data set are read; the section names them all."""

    def __init__(self, config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase,
                 model: ModelConfig | NewModelConfig | None = None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._template = ChatTemplate(tokenizer, config.system)
        self._ends = TurnEnds.of(tokenizer, model)
        self._answers = AnswerFormat(self._template, self._ends)
        self._prompts = PromptFormat(tokenizer, config.prompt or "", system=config.system, as_chat=config.as_chat)
        self.already = self._ends.already
        """How many texts had each beginning or end already."""

    def read(self, rows: Rows, i: int) -> list[Piece] | Encoded:
        """Row i as pieces of text, or as tokens if the template marks the assistant's text itself.

        Raises:
            DataError, ModelError: the row cannot be used.
        """
        config, place = self._config, rows.place(i)
        self._check_columns(rows, i)
        if config.messages is not None:
            return self._conversation(rows, i, config.messages)
        if config.prompt is None:
            column = config.text or ""
            text = checked_response(rows.value(i, column), place, column)
            return [Piece(self._ends.with_one_end(text), loss=True, leading=True)]
        column = config.response or ""
        prompt = self._prompts.read(rows, i)
        response = checked_response(rows.value(i, column), place, column)
        response = self._ends.body(response, place, column)
        if prompt.messages is not None:
            response = self._answers.of_text(prompt, response, place)
        return [Piece.of(prompt), Piece(response, loss=True)]

    def _check_columns(self, rows: Rows, i: int) -> None:
        """Where a column that is set is missing, and others would be found, say so.

        Raises:
            DataError: a column is missing, and the row has those of a usual format.
        """
        row, named = rows.records[i], self._config.named_columns
        missing = next((column for column in named.values() if column not in row), None)
        found = None if missing is None or isinstance(self._config, TextsConfig) else columns_found(row)
        if found is not None:
            fields = " and ".join(f"data.{field}" for field in named)
            raise DataError(f"{rows.place(i)}: no column {missing!r}; the row has {sorted(row)}. All rows of a data "
                            f"set have one format: leave {fields} out if it is {in_words(found)}")

    def encode(self, values: list[list[Piece] | Encoded]) -> list[Encoded]:
        """[N] rows of tokens with their ends."""
        for value in values:
            if isinstance(value, list) and value and value[0].leading:
                self.already.update(begins_already(self._tokenizer, value[0].text))
        texts = iter(encode_pieces(self._tokenizer, [v for v in values if isinstance(v, list)]))
        return [value if isinstance(value, tuple) else self._closed(next(texts)) for value in values]

    def _closed(self, row: Encoded) -> Encoded:
        """A row with its end; one of no pieces stays empty."""
        return self._ends.close_turns(row) if row[0] else row

    def _conversation(self, rows: Rows, i: int, column: str) -> list[Piece] | Encoded:
        place, options = rows.place(i), template_options(rows.records[i], rows.place(i))
        messages = checked_messages(rows.value(i, column), place, column)
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError(f"{place}: column {column!r} has no message with the role {ASSISTANT!r} to train on; its "
                            f"roles are {[message['role'] for message in messages]}")
        self._template.require(rows.source, column)
        messages = self._answers.cleaned(self._template.with_system(messages), place, column)
        self._template.require_tools(messages, place, options)
        if self._template.marks_generation:
            row = _with_loss(self._template.marked_tokens(messages, place, options), messages, place, column)
            return self._ends.close_marked(row, self._answers.header(options))
        return [Piece(text, loss) for text, loss in self._answers.turns(messages, place, column, options)]


def _with_loss(row: Encoded, messages: Messages, place: str, column: str) -> Encoded:
    """A row with marks of the assistant's turns, without those of messages that carry no loss.

    Raises:
        DataError: there are such messages, and not as many marks as messages of the assistant.
    """
    wanted = [carries_loss(message, place, column) for message in messages if message["role"] == ASSISTANT]
    if all(wanted):
        return row
    tokens, mask = row
    edges = turns_with_loss(mask)
    if len(edges) != len(wanted):
        raise DataError(f"{place}: column {column!r} has {len(wanted)} messages of the assistant, some without loss, "
                        f"and the chat template marks {len(edges)} texts; leave out the keys for loss, or use a "
                        "template that marks each message")
    kept = np.array(mask)
    for (start, stop), loss in zip(edges, wanted, strict=True):
        kept[start:stop] = loss
    return tokens, kept.tolist()


NO_LIMIT = 2**31 - 1


class TextsConfig(DemonstrationsConfig):
    """The texts of a section of pretraining text."""

    @property
    def column_fields(self) -> dict[str, str]:
        """The one column that is read."""
        return dict.fromkeys(self.named_columns.values(), "ptx.column")


def load_pretraining_text(config: PtxConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequences, LoadReport]:
    """Pretraining texts of one data set in file order, each ended by the end-of-sequence token and cut into rows; and a
    report.

    Args:
        config: a section that is not a mix.

    Raises:
        DataError, ModelError: as `load_demonstrations`.
    """
    texts, report = load_demonstrations(
        TextsConfig(path=config.path, subset=config.subset, revision=config.revision, split=config.split,
                    text=config.column, limit=config.limit, max_tokens=NO_LIMIT), tokenizer)
    return cut_rows(texts, config.max_tokens), report


def cut_rows(sequences: Sequences, longest: int) -> Sequences:
    """The same tokens in rows of at most `longest`; a rest of one token, which nothing predicts, is dropped."""
    starts = [np.arange(a, b, longest) for a, b in zip(sequences.offsets, sequences.offsets[1:], strict=False)]
    offsets = np.append(np.concatenate(starts), sequences.offsets[-1]).astype(np.int64)
    rows = Sequences(offsets, sequences.tokens, sequences.loss_mask)
    kept = np.flatnonzero(rows.lengths > 1)
    return rows if len(kept) == len(rows) else rows.select(kept)
