"""The tables of the ledger, the states of a sample, and the facts about the run that an audit needs."""

from __future__ import annotations

import json
import operator
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rlhf_ray.errors import LedgerError

if TYPE_CHECKING:
    from rlhf_ray.config.training_loop import CoordinatorConfig
    from rlhf_ray.data.cursor import PromptCursor

SCHEMA = 4
BLOCK_SAMPLES = 32_768
"""Most samples of a block of the archive. A run of fewer than twice as many keeps the row of every sample."""

# Samples are stored in order of admission (a rowid table), because they change in that order. Stored by key, in the
# shuffled order of the data, each would be on another page, and a change of a chunk would write a page per sample.
CREATE = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value);
CREATE TABLE cursor (          -- position of the data cursor
    source INTEGER PRIMARY KEY,
    handed_out INTEGER NOT NULL,  -- prompts of this source, over all its epochs
    archived INTEGER NOT NULL DEFAULT 0  -- how many of these, from the first on, have their samples in the archive
);
CREATE TABLE samples (         -- those that are not archived; rowid: number of the admission, from 1
    epoch INTEGER, row INTEGER, sample INTEGER,
    attempt INTEGER NOT NULL,  -- from 1; the next one while it is admitted
    state TEXT NOT NULL,
    version INTEGER,           -- of the weights when it was leased; once scored, the oldest among its tokens
    worker TEXT,               -- that generated it
    step INTEGER,              -- the update that consumed it, from 1
    reason TEXT,               -- of a quarantine, of an update that changed nothing, of a filtered or unused sample;
                               -- of an episode that did not complete: why, and what is done with it
    PRIMARY KEY (epoch, row, sample)
);
CREATE TABLE attempts (        -- given up
    epoch INTEGER, row INTEGER, sample INTEGER, attempt INTEGER,
    state TEXT NOT NULL,       -- the last one it reached
    worker TEXT,
    reason TEXT NOT NULL,
    PRIMARY KEY (epoch, row, sample, attempt)
) WITHOUT ROWID;
CREATE TABLE archive (         -- see `archive`
    block INTEGER PRIMARY KEY, -- from 1; samples_per_block samples each
    committed INTEGER NOT NULL, not_applied INTEGER NOT NULL, quarantined INTEGER NOT NULL,  -- samples
    filtered INTEGER NOT NULL,
    attempts INTEGER NOT NULL, -- given up
    digest TEXT NOT NULL       -- of its samples in the order of admission
);
CREATE TABLE archived_steps (  -- updates with archived samples, but for the first ones that are archived whole
    step INTEGER PRIMARY KEY,
    committed INTEGER NOT NULL, not_applied INTEGER NOT NULL  -- archived samples
);
CREATE TABLE archived_quarantine (
    row INTEGER PRIMARY KEY,   -- of a prompt with quarantined samples in the archive
    epoch INTEGER NOT NULL,    -- the last one in which it was quarantined
    reason TEXT NOT NULL       -- in the first one
);
"""


class State(StrEnum):
    """State of a sample; see `ledger` for the life cycle."""

    ADMITTED = "admitted"
    """No attempt is under way."""
    LEASED = "leased"
    """An attempt to generate it is under way. (A lease of the buffer is something else: what an update trains on.)"""
    GENERATED = "generated"
    SCORED = "scored"
    """Its experience is in the buffer."""
    CONSUMED = "consumed"
    """An update was trained on it."""
    COMMITTED = "committed"
    """That update is in a checkpoint. (A commit to the buffer is what makes a sample SCORED.)"""
    NOT_APPLIED = "not_applied"
    """An update that changed no weight was trained on it."""
    QUARANTINED = "quarantined"
    FILTERED = "filtered"
    """Dynamic sampling left it out: the scores of its prompt's samples are equal."""
    UNUSED = "unused"
    """The run ended before its turn."""


UNDER_WAY = (State.LEASED, State.GENERATED, State.SCORED)
"""States of samples with an attempt under way."""
OPEN = (State.ADMITTED, *UNDER_WAY)
"""States of samples that no update has consumed yet."""
SETTLED = (State.COMMITTED, State.NOT_APPLIED, State.QUARANTINED, State.FILTERED)
"""States that a sample never leaves."""


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
    filters: bool = False
    """Whether dynamic sampling may have left prompts out in any part of the run."""
    block_samples: int = BLOCK_SAMPLES
    """Most samples of a block of the archive; at least those of a prompt."""

    @property
    def samples_per_block(self) -> int:
        """Samples of a block of the archive: those of whole prompts."""
        return max(1, self.block_samples // self.samples_per_prompt) * self.samples_per_prompt

    def rows(self) -> Iterator[tuple[str, Any]]:
        """As rows of the table `facts`."""
        return ((name, json.dumps(value)) for name, value in asdict(self).items())

    @classmethod
    def of(cls, config: CoordinatorConfig, cursor: PromptCursor, filters: bool = False) -> Self:
        """Of a run with this configuration, whose prompts this cursor hands out."""
        order = cursor.state_dict()
        return cls(config.samples_per_step, config.samples_per_prompt, config.max_staleness,
                   tuple(order["rows"]), order["seed"], order["shuffle"], tuple(map(float, order["weights"])), filters)

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
            weights = tuple(map(float, values.pop("weights")))
            shuffle, filters = bool(values.pop("shuffle")), bool(values.pop("filters"))
            numbers = {name: operator.index(value) for name, value in values.items()}
            return cls(**numbers, source_rows=rows, weights=weights, shuffle=shuffle, filters=filters)


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


def archived_prompts(db: sqlite3.Connection) -> list[int]:
    """Prompts of each source whose samples are in the archive: the first ones, over all its epochs."""
    return [count for (count,) in db.execute("SELECT archived FROM cursor ORDER BY source")]


class ArchivedUpdates(NamedTuple):
    """The updates with samples in the archive."""

    whole: int
    """Updates 1 to `whole` are archived whole, and counted nowhere else."""
    partial: list[tuple[int, int, int]]
    """Later ones: number, archived samples that are committed, and that are not_applied."""

    @property
    def newest(self) -> int:
        """The highest number; 0 without one."""
        return self.partial[-1][0] if self.partial else self.whole


def archived_updates(db: sqlite3.Connection, facts: LedgerFacts) -> ArchivedUpdates:
    """The updates with samples in the archive of a ledger.

    Raises:
        ValueError: the archive's counts contradict each other.
    """
    partial = db.execute("SELECT step, committed, not_applied FROM archived_steps ORDER BY step").fetchall()
    consumed = db.execute("SELECT coalesce(sum(committed + not_applied), 0) FROM archive").fetchone()[0]
    whole, rest = divmod(consumed - sum(some + others for _, some, others in partial), facts.samples_per_step)
    if rest or whole < 0:
        raise ValueError(f"{consumed} samples in the archive were consumed by updates, which does not agree with the "
                         f"updates {partial} and others of {facts.samples_per_step} samples")
    return ArchivedUpdates(whole, partial)


def contents(db: sqlite3.Connection) -> list[tuple[str, str, str | None]]:
    """(kind, name, column) of all tables, indices, triggers and views of a database."""
    return db.execute("SELECT m.type, m.name, c.name FROM sqlite_master AS m LEFT JOIN pragma_table_info(m.name) AS c "
                      "WHERE m.name NOT LIKE 'sqlite_%' ORDER BY 1, 2, c.cid").fetchall()
