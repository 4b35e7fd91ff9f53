"""The records that supervised learners train on: token sequences with a loss mask, and pairs of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.encoding import Encoded, flat_tokens
from rlhf_ray.records import Ragged, offsets_of, per_token


@dataclass(frozen=True)
class Sequences(Ragged):
    """Prompt and response, or plain text, as the model sees them."""

    tokens: NDArray[np.int32] = per_token()
    loss_mask: NDArray[np.bool_] = per_token()
    """True on tokens that carry loss: all but prompt tokens. Nothing precedes a row's first token to predict it from;
    the learner skips it."""


@dataclass(frozen=True)
class Pairs:
    """Two responses to the same prompt, row by row."""

    chosen: Sequences
    rejected: Sequences
    margins: NDArray[np.float32] | None = None
    """[N] how far apart the scores should be, at least 0; None where the data has none."""

    def __post_init__(self) -> None:
        if len(self.chosen) != len(self.rejected):
            raise ValueError(f"{len(self.chosen)} chosen and {len(self.rejected)} rejected rows do not pair up")

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens per pair, both sides together."""
        return self.chosen.lengths + self.rejected.lengths

    def select(self, rows: Any) -> Self:
        """The given pairs, in the given order (copies)."""
        margins = None if self.margins is None else self.margins[np.asarray(rows, dtype=np.int64)]
        return type(self)(self.chosen.select(rows), self.rejected.select(rows), margins)

    @classmethod
    def concat(cls, parts: Iterable[Self]) -> Self:
        """All pairs in order; missing margins count as 0."""
        parts = list(parts)
        margins = None
        if any(part.margins is not None for part in parts):
            margins = np.concatenate([np.zeros(len(p), np.float32) if p.margins is None else p.margins for p in parts])
        return cls(Sequences.concat([p.chosen for p in parts]), Sequences.concat([p.rejected for p in parts]), margins)


def sequences_of(rows: list[Encoded]) -> Sequences:
    """A record of encoded rows."""
    mask = np.fromiter(chain.from_iterable(mask for _, mask in rows), dtype=bool)
    return Sequences(offsets=offsets_of([len(tokens) for tokens, _ in rows]), loss_mask=mask,
                     tokens=flat_tokens([tokens for tokens, _ in rows]))
