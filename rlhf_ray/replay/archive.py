"""Samples that are settled leave the table of samples in blocks: counts and a digest take the place of their rows.

The table then holds the samples that are open and the newest settled ones, however long the run is, and so do the copy
in a checkpoint and the file that a resumed run reads. A block is `LedgerFacts.samples_per_block` consecutive samples in
the order of admission, which is the order in which the data cursor hands prompts out. It is archived once it and the
block after it are settled, together with the checkpoint that settles them: what is archived follows from the samples
that the checkpoint contains, and not from the moment or from earlier checkpoints.

What the archive proves: before a block is archived, each of its samples must satisfy the invariants of the audit, and
the block's prompts must be the next ones of the data cursor, enumerated by `prompt_order`. So the archived samples are
those of the prompts before a position of each source, each once, and a prompt before that position is never admitted
again (`Ledger.admit`). Counts by state enter every later audit. The digest, SHA-256 of a line of text a sample, tells
whether two runs came to the same states, versions and updates of the same samples in the same order.

What it no longer answers: which version, update, worker and attempts a certain archived sample had.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from typing import NamedTuple

from rlhf_ray.errors import LedgerError
from rlhf_ray.replay.audit import sample_invariants
from rlhf_ray.replay.ledger_tables import SETTLED, LedgerFacts, State, archived_prompts, archived_updates
from rlhf_ray.replay.prompt_order import PromptPlaces


class _Sample(NamedTuple):
    epoch: int
    row: int
    sample: int
    state: str
    version: int | None
    step: int | None


def archive_settled(db: sqlite3.Connection, places: PromptPlaces) -> None:
    """Archive all blocks that are settled, but for the newest one.

    Raises:
        LedgerError: a block is not what the data cursor handed out, or a sample of it breaks an invariant.
    """
    facts = LedgerFacts.read(db)
    size = facts.samples_per_block
    while True:
        first, last = db.execute("SELECT min(rowid), max(rowid) FROM samples").fetchone()
        if first is None or last - first + 1 < 2 * size or _unsettled_before(db, first + 2 * size):
            return
        _archive_block(db, facts, places, first)


def _unsettled_before(db: sqlite3.Connection, end: int) -> bool:
    states = ", ".join(f"'{state}'" for state in SETTLED)
    return db.execute(f"SELECT 1 FROM samples WHERE rowid < ? AND state NOT IN ({states}) LIMIT 1",
                      (end,)).fetchone() is not None


def _archive_block(db: sqlite3.Connection, facts: LedgerFacts, places: PromptPlaces, first: int) -> None:
    """Archive the block whose first sample has the rowid `first`."""
    inside = (first, first + facts.samples_per_block - 1)
    for invariant, broken in sample_invariants(facts).items():
        found = db.execute(f"SELECT epoch, row, sample FROM samples WHERE rowid BETWEEN ? AND ? AND ({broken}) LIMIT 1",
                           inside).fetchone()
        if found is not None:
            raise LedgerError(f"the ledger cannot archive (epoch, row, sample) {found}, which breaks this: {invariant}."
                              " This is a bug; report it")
    samples = [_Sample(*row) for row in db.execute(
        "SELECT epoch, row, sample, state, version, step FROM samples WHERE rowid BETWEEN ? AND ? ORDER BY rowid",
        inside)]
    position = _checked(samples, facts, places, archived_prompts(db), archived_updates(db, facts).newest)
    states, digest = Counter(sample.state for sample in samples), _digest(samples)
    attempts = db.execute("DELETE FROM attempts WHERE EXISTS (SELECT 1 FROM samples AS s WHERE (s.epoch, s.row, "
                          "s.sample) = (attempts.epoch, attempts.row, attempts.sample) AND s.rowid BETWEEN ? AND ?)",
                          inside).rowcount
    db.execute(f"INSERT INTO archive ({', '.join(SETTLED)}, attempts, digest) VALUES (?, ?, ?, ?, ?, ?)",
               (*(states[state] for state in SETTLED), attempts, digest))
    db.execute("INSERT INTO archived_quarantine SELECT row, epoch, reason FROM samples WHERE rowid BETWEEN ? AND ? AND "
               "state = 'quarantined' ORDER BY rowid ON CONFLICT (row) DO UPDATE SET epoch = excluded.epoch", inside)
    db.executemany("UPDATE cursor SET archived = ? WHERE source = ?",
                   [(count, source) for source, count in enumerate(position)])
    db.execute("INSERT INTO archived_steps SELECT step, sum(state = 'committed'), sum(state = 'not_applied') FROM "
               "samples WHERE rowid BETWEEN ? AND ? AND step IS NOT NULL GROUP BY step ON CONFLICT (step) DO UPDATE "
               "SET committed = committed + excluded.committed, not_applied = not_applied + excluded.not_applied",
               inside)
    _forget_whole_steps(db, facts)
    db.execute("DELETE FROM samples WHERE rowid BETWEEN ? AND ?", inside)


def _checked(samples: list[_Sample], facts: LedgerFacts, places: PromptPlaces, position: list[int],
             newest_update: int) -> list[int]:
    """The position of each source after the prompts of a block, which must be whole, and the next ones of their sources
    after `position`."""
    each, latest = facts.samples_per_prompt, [newest_update] * len(position)
    if len(samples) != facts.samples_per_block:
        raise LedgerError(f"the ledger's next block has {len(samples)} of {facts.samples_per_block} samples: some were "
                          "removed. This is a bug; report it")
    for start in range(0, len(samples), each):
        prompt = samples[start : start + each]
        epoch, row, _, _, _, step = prompt[0]
        source, place = places.of(epoch, row)
        filtered = prompt[0].state == State.FILTERED
        whole = all(one[:3] == (epoch, row, number) and one.step == step and (one.state == State.FILTERED) == filtered
                    for number, one in enumerate(prompt))
        in_order = facts.max_staleness > 0 or step is None or step >= latest[source]
        if not (whole and in_order and place == position[source]):
            raise LedgerError(f"the ledger cannot archive row {row} of epoch {epoch}: place {place} of source "
                              f"{source}, where place {position[source]} is next, with the samples "
                              f"{list(map(tuple, prompt))}. This is a bug; report it")
        position[source] += 1
        latest[source] = latest[source] if step is None else step
    return position


def _digest(samples: list[_Sample]) -> str:
    return hashlib.sha256("".join(f"{','.join(map(str, sample))}\n" for sample in samples).encode()).hexdigest()


def _forget_whole_steps(db: sqlite3.Connection, facts: LedgerFacts) -> None:
    """Keep no count of the archived updates 1 to n of which every sample is archived: their number says everything."""
    whole, partial = archived_updates(db, facts)
    forgotten = []
    for step, committed, not_applied in partial:
        if step != whole + 1 or facts.samples_per_step not in (committed, not_applied):
            break
        whole += 1
        forgotten.append((step,))
    db.executemany("DELETE FROM archived_steps WHERE step = ?", forgotten)
