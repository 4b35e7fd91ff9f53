"""Demonstrations for supervised fine-tuning: whole texts, prompts with responses, or whole conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.data.chat import ASSISTANT, ChatTemplate, PromptFormat, checked_messages
from rlhf_ray.data.encoding import Encoded, Piece, TurnEnds, encode_pieces
from rlhf_ray.data.load_report import LoadReport, RowErrors
from rlhf_ray.data.row_readers import usable_blocks
from rlhf_ray.data.rows import Rows
from rlhf_ray.data.supervised_records import Sequences, sequences_of
from rlhf_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LOSS = "the chat template marks no text of the assistant"


def load_demonstrations(config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase,
                        row_errors: RowErrors | None = None) -> tuple[Sequences, LoadReport]:
    """Token sequences of one data set in file order, each ended by the end-of-sequence token, and a report of the
    rows left out (longer ones, and conversations without a token that carries loss).

    All tokens of a plain text carry loss; of a prompt with a response, the response's and the final token do; of a
    conversation, those of the assistant's turns.

    Args:
        config: a section that is not a mix.
        row_errors: collects malformed rows; None raises an error instead.

    Raises:
        DataError: a file or rows that cannot be used (named), or no row left.
        ModelError: no end-of-sequence token, or chat messages without a template.
    """
    row_errors = row_errors or RowErrors()
    form, report, blocks, shortest = DemonstrationFormat(config, tokenizer), LoadReport(config.location), [], np.inf
    for rows, values in usable_blocks(config, row_errors, form.read):
        sequences = sequences_of(form.encode(values))
        shortest = min(shortest, sequences.lengths.min())
        kept = report.keep(rows, {
            NO_LOSS: sequences.lengths == 0,
            f"longer than max_tokens={config.max_tokens}": sequences.lengths > config.max_tokens})
        blocks.append(sequences if len(kept) == len(rows) else sequences.select(kept))
    row_errors.finish(report, f"The shortest row has {shortest} tokens; raise max_tokens or shorten the texts")
    return Sequences.concat([sequences_of([]), *blocks]), report


class DemonstrationFormat:
    """How the columns of one data set are read."""

    def __init__(self, config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._ends, self._template = TurnEnds(tokenizer), ChatTemplate(tokenizer, config.system)
        self._prompts = PromptFormat(tokenizer, config.prompt or "", system=config.system, as_chat=config.as_chat)

    def read(self, rows: Rows, i: int) -> list[Piece] | Encoded:
        """Row i as pieces of text, or as tokens if the template marks the assistant's text itself.

        Raises:
            DataError, ModelError: the row cannot be used.
        """
        config = self._config
        if config.messages is not None:
            return self._conversation(rows, i, config.messages)
        if config.prompt is None:
            return [Piece(rows.text(i, config.text), loss=True, leading=True)]
        prompt, response = self._prompts.read(rows, i), rows.text(i, config.response)
        if prompt.messages is not None:
            response += self._template.turn_end(prompt.messages, rows.place(i))
        return [Piece.of(prompt), Piece(response, loss=True)]

    def encode(self, values: list[list[Piece] | Encoded]) -> list[Encoded]:
        """[N] rows of tokens with their ends."""
        texts = iter(encode_pieces(self._tokenizer, [v for v in values if isinstance(v, list)]))
        encoded = [next(texts) if isinstance(v, list) else v for v in values]
        return [self._ends.close(row) if self._is_chat(value) else ([*row[0], self._ends.end], [*row[1], True])
                for row, value in zip(encoded, values, strict=True)]

    def _is_chat(self, value: list[Piece] | Encoded) -> bool:
        """Whether the chat template wrote the end of the row."""
        return self._config.messages is not None or (isinstance(value, list) and not value[0].leading)

    def _conversation(self, rows: Rows, i: int, column: str) -> list[Piece] | Encoded:
        place = rows.place(i)
        messages = checked_messages(rows.value(i, column), place, column)
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError(f"{place}: column {column!r} has no message with the role {ASSISTANT!r} to train on; its "
                            f"roles are {[message['role'] for message in messages]}")
        self._template.require(rows.source, column)
        messages = self._template.with_system(messages)
        if self._template.marks_generation:
            return self._template.marked_tokens(messages, place)
        return [Piece(text, loss) for text, loss in self._template.turns(messages, place)]


NO_LIMIT = 2**31 - 1


class TextsConfig(DemonstrationsConfig):
    """The texts of a section of pretraining text."""

    @property
    def column_fields(self) -> dict[str, str]:
        """The one column that is read."""
        return {self.text: "ptx.column"}


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
