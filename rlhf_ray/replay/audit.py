"""The invariants of a ledger: those that hold at any moment, and those of a finished run. Reads only.

The first invariant, at any moment: the ledger's samples are those of the prompts that the data cursor has handed out
by its recorded position, each once, and no others. The prompts are enumerated here (`Source`) by code that shares
nothing with the cursor. A source's epoch is an order of its rows that follows from seed, epoch and source; epochs
follow one another, and the position counts rows over all of them. So of a source of R rows at position p, epochs 0 to
p // R - 1 are complete, and of the next one the first p mod R rows are handed out.

During a run, a sample is open (admitted, leased, generated, scored), consumed, or settled: committed, not_applied or
quarantined. After the run it is settled, or unused: it was under way or waited when the last update was made. At most
η + 1 batches are open or unused; and at η = 0 updates take the prompts in the order in which they were handed out, so
that none is left behind.

The staleness of a sample that update `step` consumed is `step - 1 - version`: update number 1 starts from version 0.
"""

from __future__ import annotations

import math
import operator
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.errors import LedgerError
from rlhf_ray.replay.ledger_tables import OPEN, LedgerFacts, State, reading_errors

SHOWN = 3
"""Examples in the message about a problem."""
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """One invariant that does not hold."""

    invariant: str
    violation: str


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """Samples by state, in the order of their life cycle, and the number of attempts given up."""
    with reading_errors(db):
        samples = dict(db.execute("SELECT state, count(*) FROM samples GROUP BY state"))
        attempts = db.execute("SELECT count(*) FROM attempts").fetchone()[0]
    return {**{state.value: samples.get(state, 0) for state in State}, "attempts given up": attempts}


def require_sound(db: sqlite3.Connection, ended: bool) -> None:
    """Raise unless every invariant holds; arguments as in `audit`.

    Raises:
        LedgerError: lists the invariants that do not hold.
    """
    if problems := audit(db, ended):
        listed = "\n".join(f"- {problem.invariant}: {problem.violation}" for problem in problems)
        raise LedgerError(f"the ledger audit failed:\n{listed}")


def audit(db: sqlite3.Connection, ended: bool) -> list[Problem]:
    """The invariants that do not hold.

    Args:
        ended: the run has finished, so no sample may be open.
    """
    facts = LedgerFacts.read(db)
    checks = [_states(db), _steps(db, facts), _staleness(db, facts), _groups(db, facts), _handed_out(db, facts),
              _open(db, facts), _attempts(db)]
    if facts.max_staleness == 0:
        checks.append(_in_order(db, facts))
    if ended:
        checks.append(_nothing_open(db))
    with reading_errors(db), _one_moment(db):
        return [problem for check in checks for problem in check]


@contextmanager
def _one_moment(db: sqlite3.Connection) -> Iterator[None]:
    """All reads in the block see the ledger as of the first one, although a run may be writing it."""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.rollback()


def _states(db: sqlite3.Connection) -> Iterator[Problem]:
    known = ", ".join(f"'{state}'" for state in State)
    yield from _examples(db, "every sample is in a known state", f"state NOT IN ({known})")
    yield from _examples(db, "a sample has a step exactly if an update was made with it",
                         "(step IS NOT NULL) != (state IN ('consumed', 'committed', 'not_applied'))")
    yield from _examples(db, "a sample that was quarantined, left unused, or not trained on by its update has a reason",
                         "state IN ('quarantined', 'unused', 'not_applied') AND reason IS NULL")


def _steps(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """Updates are numbered consecutively, each consumed a whole batch, and they are committed in order. Those that
    changed no weight are counted, and never committed."""
    rows = db.execute("SELECT step, count(*), sum(state = 'committed'), sum(state = 'not_applied') FROM samples WHERE "
                      "step IS NOT NULL GROUP BY step ORDER BY step").fetchall()
    numbers = [step for step, *_ in rows]
    if numbers != list(range(1, len(rows) + 1)):
        yield Problem("updates are numbered 1, 2, 3, ... without a gap", f"there are updates {_short(numbers)}")
    for step, samples, committed, skipped in rows:
        if samples != facts.samples_per_step:
            yield Problem("each update consumed one batch",
                          f"update {step} consumed {samples} samples, a batch has {facts.samples_per_step}")
        if committed not in (0, samples):
            yield Problem("an update is committed whole", f"{committed} of {samples} samples of update {step} are "
                                                          "committed")
        if skipped not in (0, samples):
            yield Problem("an update is applied or not", f"{skipped} of {samples} samples of update {step} are "
                                                         "not_applied")
    applied = [(step, bool(committed)) for step, _, committed, skipped in rows if not skipped]
    whole = [committed for _, committed in applied]
    if whole != sorted(whole, reverse=True):
        yield Problem("updates are committed in order",
                      f"update {applied[whole.index(False)][0]} is not committed, a later one is")


def _staleness(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    yield from _examples(db, f"nothing older than {facts.max_staleness} versions was trained on, and nothing newer than"
                         " the policy", f"step IS NOT NULL AND (version IS NULL OR step - 1 - version > "
                         f"{facts.max_staleness} OR version > step - 1)")


def _groups(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """The samples of a prompt are admitted together, and one update consumes all of them."""
    partial = db.execute(
        "SELECT epoch, row, count(*) FROM samples GROUP BY epoch, row HAVING count(*) != ?1 OR min(sample) != 0 OR "
        "max(sample) != ?1 - 1 LIMIT ?2", (facts.samples_per_prompt, SHOWN)).fetchall()
    if partial:
        named = ", ".join(f"{n} of row {row} in epoch {epoch}" for epoch, row, n in partial)
        yield Problem(f"each prompt that was visited has its {facts.samples_per_prompt} samples", f"there are {named}")
    split = db.execute("SELECT epoch, row, min(step), max(step) FROM samples GROUP BY epoch, row HAVING min(step) != "
                        "max(step) OR count(step) NOT IN (0, count(*)) LIMIT ?", (SHOWN,)).fetchall()
    if split:
        named = ", ".join(f"row {row} in epoch {epoch} (updates {one} to {other})" for epoch, row, one, other in split)
        yield Problem("one update consumes all samples of a prompt", f"several did of {named}")


def _handed_out(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """The prompts in the ledger are those that the data cursor has handed out."""
    position = _position(db, facts)
    if wrong := out_of_turn(facts, position):
        yield Problem("sources are handed out in proportion to their weights",
                      f"{position[wrong[0]]} of {sum(position)} prompts are of source {wrong[0]}, whose weight is "
                      f"{facts.weights[wrong[0]]:g} of {sum(facts.weights):g}")
    for source in sources(facts, position):
        yield from _source(db, source)
    yield from _examples(db, "every row is one of the data set's", f"row < 0 OR row >= {sum(facts.source_rows)}")


def _position(db: sqlite3.Connection, facts: LedgerFacts) -> list[int]:
    handed_out = dict(db.execute("SELECT source, handed_out FROM cursor"))
    position = [operator.index(handed_out[source]) for source in range(len(facts.source_rows))]
    if len(handed_out) != len(position) or min(position, default=-1) < 0 or len(facts.weights) != len(position) or min(
            *facts.source_rows, *facts.weights) <= 0:
        raise ValueError(f"a cursor over {facts.source_rows} rows, weights {facts.weights}, cannot be at {handed_out}")
    return position


def _source(db: sqlite3.Connection, source: Source) -> Iterator[Problem]:
    inside = (source.first, source.first + source.rows - 1)
    present = dict(db.execute("SELECT epoch, count(DISTINCT row) FROM samples WHERE row BETWEEN ? AND ? GROUP BY epoch",
                              inside).fetchall())
    handed_out = (epoch for epoch in range(source.under_way + 1) if source.count(epoch))
    absent = list(islice((epoch for epoch in handed_out if epoch not in present), SHOWN))
    missing, extra = [(epoch, int(row)) for epoch in absent for row in source.of(epoch)[:SHOWN]], []
    for epoch, number in sorted(present.items()):
        if number == source.count(epoch) == source.rows:
            continue  # rows of the source, each once: all of them
        rows = np.array([row for (row,) in db.execute(
            "SELECT DISTINCT row FROM samples WHERE epoch = ? AND row BETWEEN ? AND ?", (epoch, *inside))], np.int64)
        out = source.of(epoch)
        missing += [(epoch, int(row)) for row in out[~np.isin(out, rows)]]
        extra += [(epoch, int(row)) for row in rows[~np.isin(rows, out)]]
    if missing:
        yield Problem("every prompt that the data cursor handed out is in the ledger",
                      f"source {source.number}, at {source.handed_out} prompts, lacks {_prompts(missing)}")
    if extra:
        yield Problem("every prompt in the ledger was handed out by the data cursor",
                      f"source {source.number}, at {source.handed_out} prompts, has not handed out {_prompts(extra)}")


def _open(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """At most as many samples are under way as admission allows; see `staleness`."""
    most = (facts.max_staleness + 1) * facts.samples_per_step
    condition = f"state IN ({', '.join(repr(str(state)) for state in (*OPEN, State.UNUSED))})"
    if db.execute(f"SELECT count(*) FROM samples WHERE {condition}").fetchone()[0] > most:
        yield from _examples(db, f"at most {most} samples are open or unused, which is {facts.max_staleness + 1} "
                             "batches", condition)


def _in_order(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """Without staleness, an update takes the next prompts of each source that are not quarantined."""
    for source in sources(facts, _position(db, facts)):
        latest, before = 0.0, (0, 0)
        by_row: dict[tuple[int, int], float] = {
            (epoch, row): math.inf if step is None else step for epoch, row, step in db.execute(
                "SELECT epoch, row, min(step) FROM samples WHERE row BETWEEN ? AND ? AND state != 'quarantined' GROUP "
                "BY epoch, row", (source.first, source.first + source.rows - 1))}
        for epoch in sorted({epoch for epoch, _ in by_row if epoch >= 0}):
            for row in source.order(epoch).tolist():
                step = by_row.get((epoch, row), latest)
                if step < latest:
                    yield Problem("without staleness, prompts are trained on in the order in which they are handed out",
                                  f"update {step:g} consumed row {row} of epoch {epoch}, and row {before[1]} of "
                                  f"epoch {before[0]}, which comes before it, "
                                  + ("is not trained on" if latest == math.inf else f"was left for update {latest:g}"))
                    return
                if step > latest:
                    latest, before = step, (epoch, row)


def _attempts(db: sqlite3.Connection) -> Iterator[Problem]:
    """Attempts of a sample are numbered consecutively: those given up, then the present one."""
    wrong = db.execute(
        "SELECT epoch, row, sample, attempt FROM samples AS s WHERE attempt != 1 + (SELECT count(*) FROM attempts AS a "
        "WHERE a.epoch = s.epoch AND a.row = s.row AND a.sample = s.sample) LIMIT ?", (SHOWN,)).fetchall()
    if wrong:
        yield Problem("attempts of a sample are numbered consecutively", f"{_named(wrong)} have other numbers")


def _nothing_open(db: sqlite3.Connection) -> Iterator[Problem]:
    yield from _examples(db, "when a run has ended, every sample is committed, not_applied, quarantined or unused",
                         "state NOT IN ('committed', 'not_applied', 'quarantined', 'unused')")


def _examples(db: sqlite3.Connection, invariant: str, broken: str) -> Iterator[Problem]:
    """A problem that names some of the samples for which the SQL condition `broken` holds; none without such
    samples."""
    number = db.execute(f"SELECT count(*) FROM samples WHERE {broken}").fetchone()[0]
    if number:
        rows = db.execute(f"SELECT epoch, row, sample, state, step, version FROM samples WHERE {broken} LIMIT {SHOWN}")
        yield Problem(invariant, f"{number} samples break it, such as {_named(rows.fetchall())}")


def _named(rows: list[tuple[int, ...]]) -> str:
    texts = [f"(epoch {e}, row {r}, sample {s}{''.join(f', {value}' for value in more if value is not None)})"
             for e, r, s, *more in rows]
    return ", ".join(texts)


def _prompts(rows: list[tuple[int, int]]) -> str:
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return ", ".join(f"row {row} of epoch {epoch}" for epoch, row in rows[:SHOWN]) + more


def _short(numbers: list[int]) -> str:
    return f"{numbers[:5]} ... {numbers[-1]}" if len(numbers) > 6 else str(numbers)


@dataclass(frozen=True)
class Source:
    """One source of prompts."""

    number: int
    first: int
    """Its first row."""
    rows: int
    handed_out: int
    """Prompts handed out, over all its epochs."""
    seed: int
    shuffle: bool

    @property
    def under_way(self) -> int:
        """The epoch that is being handed out."""
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
        """The rows of an epoch that are handed out, in order."""
        if 0 <= epoch < self.under_way:
            return np.arange(self.first, self.first + self.rows, dtype=np.int64)
        out = self.handed_out - self.under_way * self.rows if epoch == self.under_way else 0
        return self.order(epoch)[:out] if out else np.empty(0, np.int64)

    def count(self, epoch: int) -> int:
        """How many rows of an epoch are handed out."""
        return min(max(self.handed_out - epoch * self.rows, 0), self.rows) if epoch >= 0 else 0


def sources(facts: LedgerFacts, position: Sequence[int]) -> Iterator[Source]:
    """The sources of a run whose cursor is at `position`."""
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
