"""The tables of the ledger, the states of a sample, and the facts about the run that an audit needs."""

from __future__ import annotations

import json
import operator
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from rlhf_ray.errors import LedgerError

if TYPE_CHECKING:
    from rlhf_ray.config.training_loop import CoordinatorConfig
    from rlhf_ray.data.cursor import PromptCursor

SCHEMA = 2

# Samples are stored in order of admission (a rowid table), because they change in that order. Stored by key, in the
# shuffled order of the data, each would be on another page, and a change of a chunk would write a page per sample.
CREATE = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value);
CREATE TABLE cursor (          -- position of the data cursor
    source INTEGER PRIMARY KEY,
    handed_out INTEGER NOT NULL  -- prompts of this source, over all its epochs
);
CREATE TABLE samples (
    epoch INTEGER, row INTEGER, sample INTEGER,
    attempt INTEGER NOT NULL,  -- from 1; the next one while it is admitted
    state TEXT NOT NULL,
    version INTEGER,           -- of the weights when it was leased; once scored, the oldest among its tokens
    worker TEXT,               -- that generated it
    step INTEGER,              -- the update that consumed it, from 1
    reason TEXT,               -- of a quarantine, of an update that changed nothing, and of an unused sample
    PRIMARY KEY (epoch, row, sample)
);
CREATE INDEX by_step ON samples (step);
CREATE TABLE attempts (        -- given up
    epoch INTEGER, row INTEGER, sample INTEGER, attempt INTEGER,
    state TEXT NOT NULL,       -- the last one it reached
    worker TEXT,
    reason TEXT NOT NULL,
    PRIMARY KEY (epoch, row, sample, attempt)
) WITHOUT ROWID;
"""


class State(StrEnum):
    """State of a sample; see `ledger` for the life cycle."""

    ADMITTED = "admitted"
    LEASED = "leased"
    GENERATED = "generated"
    SCORED = "scored"
    CONSUMED = "consumed"
    COMMITTED = "committed"
    NOT_APPLIED = "not_applied"
    QUARANTINED = "quarantined"
    UNUSED = "unused"


UNDER_WAY = (State.LEASED, State.GENERATED, State.SCORED)
"""States of samples with an attempt under way."""
OPEN = (State.ADMITTED, *UNDER_WAY)
"""States of samples that no update has consumed yet."""


@dataclass(frozen=True)
class LedgerFacts:
    """Facts about the run that an audit needs."""

    samples_per_step: int
    samples_per_prompt: int
    max_staleness: int
    """The largest bound that any part of the run had."""
    source_rows: tuple[int, ...]
    """Rows of each source of prompts, by source number."""
    seed: int
    """Of the order of each epoch; see `data.cursor.PromptCursor`."""
    shuffle: bool
    """Whether the rows of an epoch are shuffled."""
    weights: tuple[float, ...]
    """Of each source: prompts are taken in proportion to these."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        """As rows of the table `facts`."""
        return ((name, json.dumps(value)) for name, value in asdict(self).items())

    @classmethod
    def of(cls, config: CoordinatorConfig, cursor: PromptCursor) -> Self:
        """Of a run with this configuration, whose prompts this cursor hands out."""
        order = cursor.state_dict()
        return cls(config.samples_per_step, config.samples_per_prompt, config.max_staleness,
                   tuple(order["rows"]), order["seed"], order["shuffle"], tuple(map(float, order["weights"])))

    @classmethod
    def read(cls, db: sqlite3.Connection) -> Self:
        """The facts in a ledger.

        Raises:
            LedgerError: one is missing or not a number.
        """
        with reading_errors(db):
            texts = dict(db.execute("SELECT name, value FROM facts"))
            values = {f.name: json.loads(texts[f.name]) for f in fields(cls)}
            rows = tuple(map(operator.index, values.pop("source_rows")))
            weights, shuffle = tuple(map(float, values.pop("weights"))), bool(values.pop("shuffle"))
            numbers = {name: operator.index(value) for name, value in values.items()}
            return cls(**numbers, source_rows=rows, weights=weights, shuffle=shuffle)


@contextmanager
def reading_errors(db: sqlite3.Connection) -> Iterator[None]:
    """Raise the errors of reading a damaged file as LedgerError, which names the file.

    Raises:
        LedgerError: the block read bytes that no ledger has.
    """
    try:
        yield
    except (sqlite3.Error, ValueError, KeyError, TypeError, RecursionError) as error:
        with suppress(sqlite3.Error, ValueError):
            path = db.execute("PRAGMA database_list").fetchone()[2]
            raise LedgerError(f"{path} cannot be read: {error}") from error
        raise LedgerError(f"the ledger cannot be read: {error}") from error


def contents(db: sqlite3.Connection) -> list[tuple[str, str, str | None]]:
    """(kind, name, column) of all tables, indices, triggers and views of a database."""
    return db.execute("SELECT m.type, m.name, c.name FROM sqlite_master AS m LEFT JOIN pragma_table_info(m.name) AS c "
                      "WHERE m.name NOT LIKE 'sqlite_%' ORDER BY 1, 2, c.cid").fetchall()
