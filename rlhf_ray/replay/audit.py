"""What must hold of a ledger at any moment, and when its run has come to its end. Reads only.

The first invariant, at any moment: the samples in the ledger are those of the prompts that the data cursor has handed
out by the position that stands beside them, each once, and no others. (The prompts are enumerated anew, see
`handed_out`: a source's epoch is handed out whole before its next one begins, whatever is still under way, for batches
reach from one epoch into the next.) While the run goes on, a sample is open (admitted, leased, generated, scored),
consumed or settled: committed, not_applied or quarantined. When the run has ended it is settled, or left unused: the
run said of it that it was under way, or waited, when the last update was made. At most η + 1 batches are open or
unused; and at η = 0 updates take the prompts in the order in which they were handed out, so that none is left behind.

The staleness of a sample that update `step` consumed is `step - 1 - version`: update number 1 starts from version 0.
"""

from __future__ import annotations

import math
import operator
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rlhf_ray.errors import LedgerError
from rlhf_ray.replay.handed_out import Source, out_of_turn, sources
from rlhf_ray.replay.ledger_tables import OPEN, LedgerFacts, State, unharmed

SHOWN = 3
"""Examples named of what is wrong."""


@dataclass(frozen=True)
class Problem:
    """One invariant that does not hold."""

    invariant: str
    found: str


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """Samples by state, in the order of their life, and the attempts that came to nothing."""
    with unharmed(db):
        found = dict(db.execute("SELECT state, count(*) FROM samples GROUP BY state"))
        lost = db.execute("SELECT count(*) FROM attempts").fetchone()[0]
    return {**{state.value: found.get(state, 0) for state in State}, "attempts given up": lost}


def require_sound(db: sqlite3.Connection, ended: bool) -> None:
    """Raise unless the audit finds nothing; arguments as in `audit`.

    Raises:
        LedgerError: lists every invariant that does not hold.
    """
    if problems := audit(db, ended):
        listed = "\n".join(f"- {problem.invariant}: {problem.found}" for problem in problems)
        raise LedgerError(f"the ledger audit failed:\n{listed}")


def audit(db: sqlite3.Connection, ended: bool) -> list[Problem]:
    """The invariants that do not hold.

    Args:
        ended: the run says that it came to its end, so nothing may be under way any more.
    """
    facts = LedgerFacts.read(db)
    checks = [_states(db), _steps(db, facts), _staleness(db, facts), _groups(db, facts), _handed_out(db, facts),
              _open(db, facts), _attempts(db)]
    if facts.max_staleness == 0:
        checks.append(_in_order(db, facts))
    if ended:
        checks.append(_nothing_open(db))
    with unharmed(db), _one_moment(db):
        return [problem for check in checks for problem in check]


@contextmanager
def _one_moment(db: sqlite3.Connection) -> Iterator[None]:
    """All reads see the ledger as it is at the first one, though a run may be writing it."""
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
    yield from _examples(db, "every sample is in a state of its life", f"state NOT IN ({known})")
    yield from _examples(db, "a sample has a step exactly if an update was made with it",
                         "(step IS NOT NULL) != (state IN ('consumed', 'committed', 'not_applied'))")
    yield from _examples(db, "a sample that was quarantined, left unused, or not trained on by its update has a reason",
                         "state IN ('quarantined', 'unused', 'not_applied') AND reason IS NULL")


def _steps(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """Updates follow one another, each consumed a whole batch, and no later one is committed before an earlier one.
    Those that changed nothing are counted, and never committed."""
    rows = db.execute("SELECT step, count(*), sum(state = 'committed'), sum(state = 'not_applied') FROM samples WHERE "
                      "step IS NOT NULL GROUP BY step ORDER BY step").fetchall()
    numbers = [step for step, *_ in rows]
    if numbers != list(range(1, len(rows) + 1)):
        yield Problem("updates are numbered 1, 2, 3, ... without a gap", f"there are updates {_short(numbers)}")
    for step, samples, committed, vain in rows:
        if samples != facts.samples_per_step:
            yield Problem("each update consumed one batch",
                          f"update {step} consumed {samples} samples, a batch has {facts.samples_per_step}")
        if committed not in (0, samples):
            yield Problem("an update is committed whole", f"{committed} of {samples} samples of update {step} are")
        if vain not in (0, samples):
            yield Problem("an update is applied or not", f"{vain} of {samples} samples of update {step} say not")
    applied = [(step, bool(committed)) for step, _, committed, vain in rows if not vain]
    whole = [committed for _, committed in applied]
    if whole != sorted(whole, reverse=True):
        yield Problem("updates are committed in order",
                      f"update {applied[whole.index(False)][0]} is not, a later one is")


def _staleness(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    yield from _examples(db, f"nothing older than {facts.max_staleness} versions was trained on, and nothing newer than"
                         " the policy", f"step IS NOT NULL AND (version IS NULL OR step - 1 - version > "
                         f"{facts.max_staleness} OR version > step - 1)")


def _groups(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """The samples of a prompt are admitted together, and one update is made with all of them."""
    partial = db.execute(
        "SELECT epoch, row, count(*) FROM samples GROUP BY epoch, row HAVING count(*) != ?1 OR min(sample) != 0 OR "
        "max(sample) != ?1 - 1 LIMIT ?2", (facts.samples_per_prompt, SHOWN)).fetchall()
    if partial:
        named = ", ".join(f"{n} of row {row} in epoch {epoch}" for epoch, row, n in partial)
        yield Problem(f"each prompt that was visited has its {facts.samples_per_prompt} samples", f"there are {named}")
    parted = db.execute("SELECT epoch, row, min(step), max(step) FROM samples GROUP BY epoch, row HAVING min(step) != "
                        "max(step) OR count(step) NOT IN (0, count(*)) LIMIT ?", (SHOWN,)).fetchall()
    if parted:
        named = ", ".join(f"row {row} in epoch {epoch} (updates {one} to {other})" for epoch, row, one, other in parted)
        yield Problem("one update is made with all samples of a prompt", f"it is not so for {named}")


def _handed_out(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """The prompts in the ledger are those that the data cursor has handed out."""
    position = _position(db, facts)
    if wrong := out_of_turn(facts, position):
        yield Problem("sources are handed out in proportion to their weights",
                      f"of {sum(position)} prompts {position[wrong[0]]} are source {wrong[0]}'s, whose weight is "
                      f"{facts.weights[wrong[0]]:g} of {sum(facts.weights):g}")
    for source in sources(facts, position):
        yield from _source(db, source)
    yield from _examples(db, "every row is one of the data set's", f"row < 0 OR row >= {sum(facts.source_rows)}")


def _position(db: sqlite3.Connection, facts: LedgerFacts) -> list[int]:
    found = dict(db.execute("SELECT source, handed_out FROM cursor"))
    position = [operator.index(found[source]) for source in range(len(facts.source_rows))]
    if len(found) != len(position) or min(position, default=-1) < 0 or len(facts.weights) != len(position) or min(
            *facts.source_rows, *facts.weights) <= 0:
        raise ValueError(f"a cursor over {facts.source_rows} rows, weights {facts.weights}, cannot stand at {found}")
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
                      f"of source {source.number}, at {source.handed_out} prompts, {_prompts(missing)} is not")
    if extra:
        yield Problem("nothing is in the ledger that the data cursor did not hand out",
                      f"of source {source.number}, at {source.handed_out} prompts, {_prompts(extra)} is")


def _open(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """What admission lets be under way: see `freshness`."""
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
                                  f"update {step:g} was made with row {row} of epoch {epoch}, and row {before[1]} of "
                                  f"epoch {before[0]}, which comes before it, "
                                  + ("is not trained on" if latest == math.inf else f"was left for update {latest:g}"))
                    return
                if step > latest:
                    latest, before = step, (epoch, row)


def _attempts(db: sqlite3.Connection) -> Iterator[Problem]:
    """Attempts of a sample are numbered through: those given up, then the one that the sample has now."""
    wrong = db.execute(
        "SELECT epoch, row, sample, attempt FROM samples AS s WHERE attempt != 1 + (SELECT count(*) FROM attempts AS a "
        "WHERE a.epoch = s.epoch AND a.row = s.row AND a.sample = s.sample) LIMIT ?", (SHOWN,)).fetchall()
    if wrong:
        yield Problem("attempts of a sample are numbered through", f"{_named(wrong)} have other numbers")


def _nothing_open(db: sqlite3.Connection) -> Iterator[Problem]:
    yield from _examples(db, "when a run has ended, every sample is committed, not_applied, quarantined or unused",
                         "state NOT IN ('committed', 'not_applied', 'quarantined', 'unused')")


def _examples(db: sqlite3.Connection, invariant: str, broken: str) -> Iterator[Problem]:
    """A problem that names some of the samples for which `broken` holds; none if there are none."""
    number = db.execute(f"SELECT count(*) FROM samples WHERE {broken}").fetchone()[0]
    if number:
        found = db.execute(f"SELECT epoch, row, sample, state, step, version FROM samples WHERE {broken} LIMIT {SHOWN}")
        yield Problem(invariant, f"{number} samples break it, such as {_named(found.fetchall())}")


def _named(rows: list[tuple[int, ...]]) -> str:
    texts = [f"(epoch {e}, row {r}, sample {s}{''.join(f', {value}' for value in more if value is not None)})"
             for e, r, s, *more in rows]
    return ", ".join(texts)


def _prompts(found: list[tuple[int, int]]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(f"row {row} of epoch {epoch}" for epoch, row in found[:SHOWN]) + more


def _short(numbers: list[int]) -> str:
    return f"{numbers[:5]} ... {numbers[-1]}" if len(numbers) > 6 else str(numbers)
