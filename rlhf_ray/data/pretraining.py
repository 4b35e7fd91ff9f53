"""Pretraining text for the policy's update: every token of every text, in rows of bounded length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.config.algorithm import PtxConfig
from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.data.demonstrations import load_demonstrations
from rlhf_ray.data.sequences import Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LIMIT = 2**31 - 1


class TextsConfig(DemonstrationsConfig):
    """Whole texts, which a section of its own names."""

    @property
    def column_fields(self) -> dict[str, str]:
        """The one column that is read."""
        return {self.text: "ptx.column"}


def load_pretraining_text(config: PtxConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequences, str]:
    """Texts in file order, each ended by the end-of-sequence token and cut where it is too long; and a report.

    Raises:
        DataError, ModelError: as `load_demonstrations`.
    """
    texts, report = load_demonstrations(
        TextsConfig(path=config.path, split=config.split, text=config.column, limit=config.limit,
                             max_tokens=NO_LIMIT), tokenizer)
    rows = cut_rows(texts, config.max_tokens)
    return rows, f"{report}, as {len(rows)} rows of at most {config.max_tokens} tokens"


def cut_rows(sequences: Sequences, longest: int) -> Sequences:
    """The same tokens in rows of at most `longest`; what has one token left, which nothing predicts, is dropped."""
    starts = [np.arange(a, b, longest) for a, b in zip(sequences.offsets, sequences.offsets[1:], strict=False)]
    offsets = np.append(np.concatenate(starts), sequences.offsets[-1]).astype(np.int64)
    rows = Sequences(offsets, sequences.tokens, sequences.loss_mask)
    kept = np.flatnonzero(rows.lengths > 1)
    return rows if len(kept) == len(rows) else rows.select(kept)
