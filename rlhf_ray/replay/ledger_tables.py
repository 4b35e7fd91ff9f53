"""The tables of the ledger, and the facts about its run that stand in it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self

SCHEMA = 1

# Samples lie in the order of their admission (a rowid table), for that is how they change. By key, in the shuffled
# order of the data, each would lie on another page, and each change of a chunk would write as many pages as samples.
CREATE = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value);
CREATE TABLE samples (
    epoch INTEGER, row INTEGER, sample INTEGER,
    attempt INTEGER NOT NULL,  -- from 1
    state TEXT NOT NULL,
    version INTEGER,           -- of the weights when it was leased; once scored, the oldest among its tokens
    worker TEXT,               -- who drew it
    step INTEGER,              -- the update that consumed it, from 1
    reason TEXT,               -- of a quarantine, and of an update that changed nothing
    PRIMARY KEY (epoch, row, sample)
);
CREATE INDEX by_step ON samples (step);
CREATE TABLE attempts (        -- that came to nothing
    epoch INTEGER, row INTEGER, sample INTEGER, attempt INTEGER,
    state TEXT NOT NULL,       -- how far it came
    worker TEXT,
    reason TEXT NOT NULL,
    PRIMARY KEY (epoch, row, sample, attempt)
) WITHOUT ROWID;
"""


class State(StrEnum):
    """Where a sample is in its life; see `ledger`."""

    LEASED = "leased"
    GENERATED = "generated"
    SCORED = "scored"
    CONSUMED = "consumed"
    COMMITTED = "committed"
    NOT_APPLIED = "not_applied"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class LedgerFacts:
    """What an audit has to know of the run."""

    samples_per_step: int
    samples_per_prompt: int
    max_staleness: int
    """The largest that any part of the run allowed."""
    source_rows: tuple[int, ...]
    """Rows of each source of prompts; sources are numbered through."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        """As rows of the table `facts`."""
        return ((name, json.dumps(value)) for name, value in asdict(self).items())

    @classmethod
    def read(cls, db: sqlite3.Connection) -> Self:
        """The facts in a ledger."""
        found = dict(db.execute("SELECT name, value FROM facts"))
        values = {f.name: json.loads(found[f.name]) for f in fields(cls)}
        return cls(**{**values, "source_rows": tuple(values["source_rows"])})
