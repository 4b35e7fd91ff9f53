"""What must hold of a ledger at any moment, and when its run has come to its end. Reads only.

The staleness of a sample that update `step` consumed is `step - 1 - version`: update number 1 starts from version 0.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_ray.errors import LedgerError
from rlhf_ray.replay.ledger_tables import LedgerFacts, State, unharmed

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
        raise LedgerError(f"the ledger does not add up:\n{listed}")


def audit(db: sqlite3.Connection, ended: bool) -> list[Problem]:
    """The invariants that do not hold.

    Args:
        ended: the run says that it came to its end, so nothing may be under way any more.
    """
    facts = LedgerFacts.read(db)
    checks = [_states(db), _steps(db, facts), _staleness(db, facts), _groups(db, facts), _epochs(db, facts),
              _attempts(db)]
    if ended:
        checks.append(_nothing_open(db))
    with unharmed(db):
        return [problem for check in checks for problem in check]


def _states(db: sqlite3.Connection) -> Iterator[Problem]:
    known = ", ".join(f"'{state}'" for state in State)
    yield from _examples(db, "every sample is in a state of its life", f"state NOT IN ({known})")
    yield from _examples(db, "a sample has a step exactly if an update was made with it",
                         "(step IS NOT NULL) != (state IN ('consumed', 'committed', 'not_applied'))")
    yield from _examples(db, "a sample that was quarantined, or not trained on by its update, has a reason",
                         "state IN ('quarantined', 'not_applied') AND reason IS NULL")


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
    """The samples of a prompt are admitted together."""
    partial = db.execute(
        "SELECT epoch, row, count(*) FROM samples GROUP BY epoch, row HAVING count(*) != ?1 OR min(sample) != 0 OR "
        "max(sample) != ?1 - 1 LIMIT ?2", (facts.samples_per_prompt, SHOWN)).fetchall()
    if partial:
        named = ", ".join(f"{n} of row {row} in epoch {epoch}" for epoch, row, n in partial)
        yield Problem(f"each prompt that was visited has its {facts.samples_per_prompt} samples", f"there are {named}")


def _epochs(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """Every row of a source was visited in an epoch before any is visited in the next."""
    first = 0
    for rows in facts.source_rows:
        inside, first = (first, first + rows - 1), first + rows
        visited = db.execute(
            "SELECT epoch, count(DISTINCT row) FROM (SELECT epoch, row FROM samples UNION SELECT epoch, row FROM "
            "attempts) WHERE row BETWEEN ? AND ? GROUP BY epoch ORDER BY epoch", inside).fetchall()
        for place, (epoch, distinct) in enumerate(visited):
            if epoch != place or (place < len(visited) - 1 and distinct != rows):
                yield Problem("each epoch visits every row before the next begins",
                              f"of rows {inside[0]} to {inside[1]}, {distinct} were visited in epoch {epoch}")
    yield from _examples(db, "every row is one of the data set's", f"row < 0 OR row >= {first}")


def _attempts(db: sqlite3.Connection) -> Iterator[Problem]:
    """Attempts of a sample are numbered through: those given up, then the one that the sample has now."""
    wrong = db.execute(
        "SELECT epoch, row, sample, attempt FROM samples AS s WHERE attempt != 1 + (SELECT count(*) FROM attempts AS a "
        "WHERE a.epoch = s.epoch AND a.row = s.row AND a.sample = s.sample) LIMIT ?", (SHOWN,)).fetchall()
    if wrong:
        yield Problem("attempts of a sample are numbered through", f"{_named(wrong)} have other numbers")


def _nothing_open(db: sqlite3.Connection) -> Iterator[Problem]:
    yield from _examples(db, "when a run has ended, every sample is committed, not_applied or quarantined",
                         "state NOT IN ('committed', 'not_applied', 'quarantined')")


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


def _short(numbers: list[int]) -> str:
    return f"{numbers[:5]} ... {numbers[-1]}" if len(numbers) > 6 else str(numbers)
