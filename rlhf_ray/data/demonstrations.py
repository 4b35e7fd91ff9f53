"""Demonstrations for supervised fine-tuning: whole texts, prompts with responses, or whole conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.data.chat import ASSISTANT, ChatTemplate, PromptFormat, checked_messages
from rlhf_ray.data.encoding import Encoded, Piece, TurnEnds, encode_pieces
from rlhf_ray.data.faults import Faults
from rlhf_ray.data.reading import section_rows
from rlhf_ray.data.report import LoadReport
from rlhf_ray.data.rows import Rows
from rlhf_ray.data.sequences import Sequences, sequences_of
from rlhf_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_demonstrations(config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase,
                        faults: Faults | None = None) -> tuple[Sequences, LoadReport]:
    """Token sequences of one data set in file order, each ended by the end-of-sequence token, and what was left out
    (longer rows).

    All tokens of a plain text carry loss; of a prompt with a response, the response's and the final token do; of a
    conversation, those of the assistant's turns.

    Args:
        config: a section that is no mix.
        faults: takes malformed rows; when None they are an error.

    Raises:
        DataError: a file or rows that cannot be used (named), or no row left.
        ModelError: no end-of-sequence token, or chat messages without a template.
    """
    faults = faults or Faults()
    form, report, blocks, shortest = DemonstrationFormat(config, tokenizer), LoadReport(config.location), [], np.inf
    for rows in section_rows(config, faults):
        rows, values = faults.values(rows, form.read)
        if faults.hopeless or not len(rows):
            continue
        sequences = sequences_of(form.encode(values))
        shortest = min(shortest, sequences.lengths.min())
        kept = report.keep(rows, {f"longer than max_tokens={config.max_tokens}": sequences.lengths > config.max_tokens})
        blocks.append(sequences if len(kept) == len(rows) else sequences.select(kept))
    faults.finish(report, f"The shortest row has {shortest} tokens; raise max_tokens or shorten the texts")
    return Sequences.concat([sequences_of([]), *blocks]), report


class DemonstrationFormat:
    """What the columns of one data set mean."""

    def __init__(self, config: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._ends, self._template = TurnEnds(tokenizer), ChatTemplate(tokenizer, config.system)
        self._prompts = PromptFormat(tokenizer, config.prompt or "", system=config.system, as_chat=config.as_chat)

    def read(self, rows: Rows, i: int) -> list[Piece] | Encoded:
        """Row i as pieces of text, or as tokens where the template itself marks what the assistant writes.

        Raises:
            DataError, ModelError: the row cannot be used.
        """
        config = self._config
        if config.messages is not None:
            return self._conversation(rows, i, config.messages)
        if config.prompt is None:
            return [Piece(rows.text(i, config.text), loss=True, leading=True)]
        return [Piece.of(self._prompts.read(rows, i)), Piece(rows.text(i, config.response), loss=True)]

    def encode(self, values: list[list[Piece] | Encoded]) -> list[Encoded]:
        """[N] rows of tokens with their ends."""
        texts = iter(encode_pieces(self._tokenizer, [v for v in values if isinstance(v, list)]))
        found = [next(texts) if isinstance(v, list) else v for v in values]
        if self._config.messages is not None:
            return [self._ends.close(row) for row in found]
        return [([*tokens, self._ends.end], [*mask, True]) for tokens, mask in found]

    def _conversation(self, rows: Rows, i: int, column: str) -> list[Piece] | Encoded:
        place = rows.place(i)
        messages = checked_messages(rows.value(i, column), place, column)
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError(f"{place}: column {column!r} has no message of the role {ASSISTANT!r} to learn from; its "
                            f"roles are {[message['role'] for message in messages]}")
        self._template.require(rows.source, column)
        messages = self._template.with_system(messages)
        if self._template.marks_generation:
            return self._template.marked_tokens(messages, place)
        return [Piece(text, loss) for text, loss in self._template.turns(messages, place)]
