"""The order in which the data cursor hands out prompts, enumerated by code that shares nothing with the cursor.

A source's epoch is an order of its rows that follows from seed, epoch and source; epochs follow one another, and a
position counts rows over all of them. So of a source of R rows at position p, epochs 0 to p // R - 1 are complete, and
of the next one the first p mod R rows are handed out. The ledger's archive, too, holds the prompts before a position.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.replay.ledger_tables import LedgerFacts, archived_prompts

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """One source of prompts."""

    number: int
    first: int
    """Its first row."""
    rows: int
    handed_out: int
    """Prompts handed out, over all its epochs."""
    archived: int
    """How many of these, from the first on, have their samples in the archive; the samples of the others have rows."""
    seed: int
    shuffle: bool

    @property
    def under_way(self) -> int:
        """The epoch that is being handed out."""
        return self.handed_out // self.rows

    @property
    def epochs(self) -> range:
        """The epochs with prompts that are handed out and not archived; perhaps one more."""
        return range(self.archived // self.rows, self.under_way + 1)

    def order(self, epoch: int) -> Rows:
        """[rows] all rows of the source in the order of an epoch."""
        places = np.arange(self.rows, dtype=np.int64)
        if self.shuffle:
            named = (self.seed, epoch, self.number)[: 3 if self.number else 2]
            words = np.random.Philox(seed=list(named)).random_raw(self.rows)
            places = np.lexsort((places, words))  # by word; equal words by place
        return places + self.first

    def of(self, epoch: int) -> Rows:
        """The rows of an epoch that are handed out and not archived, in order."""
        start, end = self._window(epoch)
        return self.order(epoch)[start:end] if start < end else np.empty(0, np.int64)

    def count(self, epoch: int) -> int:
        """How many rows of an epoch are handed out and not archived."""
        start, end = self._window(epoch)
        return end - start

    def _window(self, epoch: int) -> tuple[int, int]:
        """First place of an epoch that is not archived, and the first that is not handed out."""
        if epoch < 0:
            return 0, 0
        start, end = (min(max(position - epoch * self.rows, 0), self.rows)
                      for position in (self.archived, self.handed_out))
        return min(start, end), end


def sources(facts: LedgerFacts, position: Sequence[int], archived: Sequence[int] | None = None) -> Iterator[Source]:
    """The sources of a run whose cursor is at `position`, and whose ledger has archived the prompts before `archived`
    (none by default)."""
    first, archived = 0, archived or [0] * len(position)
    for number, (rows, out, start) in enumerate(zip(facts.source_rows, position, archived, strict=True)):
        yield Source(number, first, rows, out, start, facts.seed, facts.shuffle)
        first += rows


def out_of_turn(facts: LedgerFacts, position: Sequence[int]) -> list[int]:
    """Sources whose number of turns is a whole turn or more away from their exact share of all turns."""
    weights = [Fraction(str(weight)) for weight in facts.weights]
    turns, total = sum(position), sum(weights)
    return [n for n, (out, weight) in enumerate(zip(position, weights, strict=True))
            if abs(out - turns * weight / total) >= 1]


def archived_epochs(db: sqlite3.Connection, row: int) -> int:
    """In how many epochs, from 0 on, the samples of a prompt are archived; 0 for a row that the data lack."""
    facts = LedgerFacts.read(db)
    for source in sources(facts, archived := archived_prompts(db)):
        if source.first <= row < source.first + source.rows:
            whole = archived[source.number] // source.rows
            return whole + PromptPlaces(facts).precedes(whole, row, archived)
    return 0


class PromptPlaces:
    """The place of each prompt in its source's order, counted over all epochs as positions are. Of each source, the
    order of the epoch asked for last is kept: 4 bytes a row for up to 4 billion."""

    def __init__(self, facts: LedgerFacts) -> None:
        self._sources = list(sources(facts, [0] * len(facts.source_rows)))
        self._ends = list(accumulate(facts.source_rows))
        self._known: dict[int, tuple[int, NDArray[np.integer[Any]]]] = {}

    def of(self, epoch: int, row: int) -> tuple[int, int]:
        """(source, place) of a prompt.

        Raises:
            IndexError: the data have no such row.
        """
        source = self._source(row)
        return source.number, epoch * source.rows + self._within(source, epoch, row)

    def precedes(self, epoch: int, row: int, position: Sequence[int]) -> bool:
        """Whether a prompt comes before the position of its source.

        Raises:
            IndexError: the data have no such row.
        """
        source = self._source(row)
        left = position[source.number] - epoch * source.rows
        return left > 0 and (left >= source.rows or self._within(source, epoch, row) < left)

    def _source(self, row: int) -> Source:
        if not 0 <= row < self._ends[-1]:
            raise IndexError(f"row {row} of {self._ends[-1]}")
        return self._sources[bisect_right(self._ends, row)]

    def _within(self, source: Source, epoch: int, row: int) -> int:
        """A prompt's place in the epoch."""
        if not source.shuffle:
            return row - source.first
        known = self._known.get(source.number)
        if known is None or known[0] != epoch:
            kind = np.min_scalar_type(source.rows)
            places = np.empty(source.rows, kind)
            places[source.order(epoch) - source.first] = np.arange(source.rows, dtype=kind)
            known = self._known[source.number] = (epoch, places)
        return int(known[1][row - source.first])
