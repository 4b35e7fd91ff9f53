"""The invariants of a ledger: those that hold at any moment, and those of a finished run. Reads only.

The first invariant, at any moment: the ledger's samples are those of the prompts that the data cursor has handed out
by its recorded position, each once, and no others. The prompts are enumerated by code that shares nothing with the
cursor (`prompt_order`). Those of each source's first prompts are archived, in blocks that were checked when they were
archived (`archive`); the samples of all others have rows, which are checked here.

During a run, a sample is open (admitted, leased, generated, scored), consumed, or settled: committed, not_applied,
quarantined or filtered. After the run it is settled, or unused: it was under way or waited when the last update was
made. At most η + 1 batches are open or unused; and at η = 0 updates take the prompts in the order in which they were
handed out, so that none is left behind.

The staleness of a sample that update `step` consumed is `step - 1 - version`: update number 1 starts from version 0.
"""

from __future__ import annotations

import math
import operator
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rlhf_ray.errors import LedgerError
from rlhf_ray.replay.ledger_tables import (
    OPEN,
    SETTLED,
    LedgerFacts,
    State,
    archived_prompts,
    archived_updates,
    reading_errors,
)
from rlhf_ray.replay.prompt_order import Source, out_of_turn, sources

SHOWN = 3
"""Examples in the message about a problem."""


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
        *settled, given_up = db.execute(f"SELECT {', '.join(f'coalesce(sum({name}), 0)' for name in SETTLED)}, "
                                        "coalesce(sum(attempts), 0) FROM archive").fetchone()
    archived = dict(zip(SETTLED, settled, strict=True))
    return {**{state.value: samples.get(state, 0) + archived.get(state, 0) for state in State},
            "attempts given up": attempts + given_up}


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
    checks = [_samples(db, facts), _archive(db, facts), _steps(db, facts), _groups(db, facts), _handed_out(db, facts),
              _open(db, facts)]
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


def sample_invariants(facts: LedgerFacts) -> dict[str, str]:
    """What holds for each sample at any moment, and the SQL condition of the samples that break it."""
    known = ", ".join(f"'{state}'" for state in State)
    return {
        "every sample is in a known state": f"state NOT IN ({known})",
        "a sample has a step exactly if an update was made with it":
            "(step IS NOT NULL) != (state IN ('consumed', 'committed', 'not_applied'))",
        "a sample that was quarantined, filtered, left unused, or not trained on by its update has a reason":
            "state IN ('quarantined', 'filtered', 'unused', 'not_applied') AND reason IS NULL",
        "samples are filtered once they are generated, and in a run with dynamic sampling alone":
            f"state = 'filtered' AND (worker IS NULL OR NOT {int(facts.filters)})",
        f"nothing older than {facts.max_staleness} versions was trained on, and nothing newer than the policy":
            f"step IS NOT NULL AND (version IS NULL OR step - 1 - version > {facts.max_staleness} OR version > step - "
            "1)",
        "every row is one of the data set's": f"row < 0 OR row >= {sum(facts.source_rows)}",
        "attempts of a sample are numbered consecutively":  # those given up, then the present one
            "attempt != 1 + (SELECT count(*) FROM attempts AS a WHERE (a.epoch, a.row, a.sample) = (samples.epoch, "
            "samples.row, samples.sample))",
    }


def _samples(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    for invariant, broken in sample_invariants(facts).items():
        yield from _examples(db, invariant, broken)


def _archive(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """The archive has whole blocks without a gap, which are the samples of the archived prompts."""
    blocks = db.execute(f"SELECT block, {' + '.join(SETTLED)} FROM archive ORDER BY block").fetchall()
    if blocks != [(number, facts.samples_per_block) for number in range(1, len(blocks) + 1)]:
        yield Problem(f"the archive has blocks of {facts.samples_per_block} samples without a gap",
                      f"there are blocks of {_short([samples for _, samples in blocks])} samples, numbered "
                      f"{_short([number for number, _ in blocks])}")
    samples, archived = sum(samples for _, samples in blocks), archived_prompts(db)
    if sum(archived) * facts.samples_per_prompt != samples:
        yield Problem("the archive has the samples of the archived prompts",
                      f"{samples} samples are in the archive, and {archived} prompts of each source with "
                      f"{facts.samples_per_prompt} samples each are archived")
    first = db.execute("SELECT min(rowid) FROM samples").fetchone()[0]
    if blocks and first != samples + 1:
        yield Problem("the samples after the archive have rows",
                      f"{samples} samples are in the archive, and the first one with a row is number {first}")


def _steps(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """Updates are numbered consecutively, each consumed a whole batch, and they are committed in order. Those that
    changed no weight are counted, and never committed."""
    archived = archived_updates(db, facts)
    by_step: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])  # samples, those committed, those not applied
    present = db.execute("SELECT step, count(*), sum(state = 'committed'), sum(state = 'not_applied') FROM samples "
                         "WHERE step IS NOT NULL GROUP BY step").fetchall()
    for step, *numbers in (*((step, some + others, some, others) for step, some, others in archived.partial), *present):
        by_step[step] = [before + more for before, more in zip(by_step[step], numbers, strict=True)]
    rows = [(step, *by_step[step]) for step in sorted(by_step)]
    numbers = [step for step, *_ in rows]
    if numbers != list(range(archived.whole + 1, archived.whole + len(rows) + 1)):
        yield Problem("updates are numbered 1, 2, 3, ... without a gap", f"there are updates {_short(numbers)}"
                      + (f" after {archived.whole} in the archive" if archived.whole else ""))
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


def _groups(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """The samples of a prompt are admitted together, and one update consumes all of them, or all are filtered."""
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
    halves = db.execute("SELECT epoch, row FROM samples GROUP BY epoch, row HAVING min(state = 'filtered') != "
                        "max(state = 'filtered') LIMIT ?", (SHOWN,)).fetchall()
    if halves:
        yield Problem("all samples of a prompt are filtered, or none", f"some are of {_prompts(halves)}")


def _handed_out(db: sqlite3.Connection, facts: LedgerFacts) -> Iterator[Problem]:
    """The prompts in the ledger are those that the data cursor has handed out."""
    position, archived = _position(db, facts), archived_prompts(db)
    if any(not 0 <= start <= out for start, out in zip(archived, position, strict=True)):
        raise ValueError(f"of the {position} prompts that a cursor handed out, {archived} cannot be archived")
    if wrong := out_of_turn(facts, position):
        yield Problem("sources are handed out in proportion to their weights",
                      f"{position[wrong[0]]} of {sum(position)} prompts are of source {wrong[0]}, whose weight is "
                      f"{facts.weights[wrong[0]]:g} of {sum(facts.weights):g}")
    for source in sources(facts, position, archived):
        yield from _source(db, source)


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
    handed_out = (epoch for epoch in source.epochs if source.count(epoch))
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
    """Without staleness, an update takes the next prompts of each source that are not quarantined or filtered."""
    newest = archived_updates(db, facts).newest
    for source in sources(facts, _position(db, facts), archived_prompts(db)):
        latest, before = float(newest), (0, 0)
        by_row: dict[tuple[int, int], float] = {
            (epoch, row): math.inf if step is None else step for epoch, row, step in db.execute(
                "SELECT epoch, row, min(step) FROM samples WHERE row BETWEEN ? AND ? AND state NOT IN ('quarantined', "
                "'filtered') GROUP BY epoch, row", (source.first, source.first + source.rows - 1))}
        for epoch in sorted({epoch for epoch, _ in by_row if epoch >= 0}):
            for row in source.of(epoch).tolist():
                step = by_row.get((epoch, row), latest)
                if step < latest:
                    yield Problem("without staleness, prompts are trained on in the order in which they are handed out",
                                  f"update {step:g} consumed row {row} of epoch {epoch}, and row {before[1]} of "
                                  f"epoch {before[0]}, which comes before it, "
                                  + ("is not trained on" if latest == math.inf else f"was left for update {latest:g}"))
                    return
                if step > latest:
                    latest, before = step, (epoch, row)


def _nothing_open(db: sqlite3.Connection) -> Iterator[Problem]:
    yield from _examples(db, f"when a run has ended, every sample is {', '.join(SETTLED)} or unused",
                         f"state NOT IN ({', '.join(repr(str(state)) for state in (*SETTLED, State.UNUSED))})")


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
