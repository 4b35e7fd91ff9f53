"""What a data cursor has handed out by the time it stands at a position: said again, for the audit, by code that shares
nothing with the cursor.

A source's epoch is an order of its rows, by seed, epoch and source; epochs follow one another, and the position counts
rows over all of them. So of a source of R rows at position p, epochs 0 to p // R - 1 are whole, and of the next one the
first p mod R rows are out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.replay.ledger_tables import LedgerFacts

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """One source of prompts."""

    number: int
    first: int
    """Its first row."""
    rows: int
    handed_out: int
    """Prompts, over all its epochs."""
    seed: int
    shuffle: bool

    @property
    def under_way(self) -> int:
        """The epoch that is handed out now."""
        return self.handed_out // self.rows

    def order(self, epoch: int) -> Rows:
        """[rows] all rows of the source in the order of an epoch."""
        places = np.arange(self.rows, dtype=np.int64)
        if self.shuffle:
            named = (self.seed, epoch, self.number)[: 3 if self.number else 2]
            words = np.random.Philox(seed=list(named)).random_raw(self.rows)
            places = np.lexsort((places, words))  # by word; equal words by place
        return places + self.first

    def of(self, epoch: int) -> Rows:
        """The rows of an epoch that are out, in order."""
        if 0 <= epoch < self.under_way:
            return np.arange(self.first, self.first + self.rows, dtype=np.int64)
        out = self.handed_out - self.under_way * self.rows if epoch == self.under_way else 0
        return self.order(epoch)[:out] if out else np.empty(0, np.int64)

    def count(self, epoch: int) -> int:
        """How many rows of an epoch are out."""
        return min(max(self.handed_out - epoch * self.rows, 0), self.rows) if epoch >= 0 else 0


def sources(facts: LedgerFacts, position: Sequence[int]) -> Iterator[Source]:
    """The sources of a run whose cursor stands at `position`."""
    first = 0
    for number, (rows, out) in enumerate(zip(facts.source_rows, position, strict=True)):
        yield Source(number, first, rows, out, facts.seed, facts.shuffle)
        first += rows


def out_of_turn(facts: LedgerFacts, position: Sequence[int]) -> list[int]:
    """Sources whose number of turns is a whole turn or more away from their exact share of all turns."""
    weights = [Fraction(str(weight)) for weight in facts.weights]
    turns, total = sum(position), sum(weights)
    return [n for n, (out, weight) in enumerate(zip(position, weights, strict=True))
            if abs(out - turns * weight / total) >= 1]
