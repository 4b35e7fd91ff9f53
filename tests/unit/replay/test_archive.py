"""The ledger's archive: what leaves the table of samples, what stays proven of it, and what is never let in again."""

import hashlib
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from rlhf_ray.errors import LedgerError
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.unit.replay.simulated_run import SimulatedRun

SMALL = LedgerFacts(samples_per_step=6, samples_per_prompt=2, max_staleness=0, source_rows=(5, 4), seed=3, shuffle=True,
                    weights=(2.0, 1.0), block_samples=8)
"""Blocks of 8 samples do not end where updates of 6 do."""


def run_of(place, facts=SMALL, steps=12, every=2, dies_after=(), **more):
    """A run that saves every so many steps, and dies after some steps, each time going on from its last checkpoint."""
    place.mkdir()
    run, dies = SimulatedRun(place, facts, **more), set(dies_after)
    while run.step < steps:
        run.train()
        if run.step in dies:
            dies.remove(run.step)
            run.die()
        elif run.step % every == 0:
            run.save()
    run.end()
    return run


def rows(path, query):
    with closing(open_for_reading(path)) as db:
        return db.execute(query).fetchall()


def state(path):
    """Everything but the attempts, which are of other workers and numbers after a death."""
    tables = ("SELECT epoch, row, sample, state, version, step FROM samples", "SELECT * FROM cursor",
              "SELECT block, committed, not_applied, quarantined, filtered, digest FROM archive",
              "SELECT * FROM archived_steps",
              "SELECT * FROM archived_quarantine")
    return [rows(path, f"{query} ORDER BY 1, 2, 3") for query in tables]


def test_a_long_run_keeps_the_rows_of_the_newest_samples_alone_and_adds_up(tmp_path):
    run = run_of(tmp_path / "run", steps=50)
    assert len(rows(run.path, "SELECT * FROM samples")) < 2 * 8 + 2 * 6
    assert len(rows(run.path, "SELECT * FROM archived_steps")) <= 1
    assert len(rows(run.path, "SELECT * FROM attempts")) < 9
    with closing(open_for_reading(run.path)) as db:
        assert audit(db, ended=True) == [] and counts(db)["committed"] == 300
    with closing(open_for_reading(tmp_path / "run/copy.sqlite")) as db:
        assert audit(db, ended=False) == [] and counts(db)["committed"] == 300


@pytest.mark.parametrize("staleness", [0, 2])
def test_counts_and_digests_are_those_of_the_rows_that_a_run_without_an_archive_keeps(tmp_path, staleness):
    facts = replace(SMALL, max_staleness=staleness, filters=True)
    mine = run_of(tmp_path / "archived", facts, quarantines=0.1)
    theirs = run_of(tmp_path / "whole", replace(facts, block_samples=10_000), quarantines=0.1)
    with closing(open_for_reading(mine.path)) as db, closing(open_for_reading(theirs.path)) as other:
        assert counts(db) == counts(other) and min(counts(db)["quarantined"], counts(db)["filtered"]) > 4
    kept = rows(theirs.path, "SELECT epoch, row, sample, state, version, step FROM samples ORDER BY rowid")
    blocks = rows(mine.path, "SELECT digest, committed, quarantined, filtered FROM archive ORDER BY block")
    assert len(blocks) > 4
    for start, block in zip(range(0, len(kept), 8), blocks, strict=False):
        samples = kept[start : start + 8]
        text = "".join(",".join(str(value) for value in sample) + "\n" for sample in samples)
        states = [sample[3] for sample in samples]
        assert block == (hashlib.sha256(text.encode()).hexdigest(), states.count("committed"),
                         states.count("quarantined"), states.count("filtered"))
    assert rows(mine.path, "SELECT epoch, row, sample, state, version, step FROM samples ORDER BY rowid") == kept[
        len(blocks) * 8 :]


@pytest.mark.parametrize(("every", "dies_after"), [(2, (3, 7, 11)), (2, (9, 9)), (1, ()), (3, (4,)), (12, ())])
def test_what_is_archived_depends_neither_on_deaths_nor_on_earlier_checkpoints(tmp_path, every, dies_after):
    undisturbed = run_of(tmp_path / "undisturbed")
    disturbed = run_of(tmp_path / "disturbed", every=every, dies_after=dies_after)
    assert state(undisturbed.path) == state(disturbed.path) and len(rows(disturbed.path, "SELECT * FROM archive")) > 3


def test_an_archived_prompt_is_never_admitted_again(tmp_path):
    run = run_of(tmp_path / "run", replace(SMALL, source_rows=(30, 4)), steps=20)  # in the middle of an epoch
    ledger = Ledger(run.path)
    first, second = rows(run.path, "SELECT handed_out, archived FROM cursor ORDER BY source")
    assert first[1] % 30 and second[1] > 4
    kept = {key[:2] for key in rows(run.path, "SELECT epoch, row FROM samples")}
    run.cursor = run._new_cursor()
    archived = [prompt for prompt in run.cursor.next(first[0] + second[0]) if prompt not in kept]
    assert len(archived) == first[1] + second[1]
    for epoch, row in archived:
        with pytest.raises(LedgerError, match=f"row {row} of epoch {epoch} was admitted twice: its samples are in the"):
            ledger.admit([SampleKey(epoch, row, sample) for sample in range(2)], [first[0] + 1, second[0]])
    for change in (ledger.start_attempt, ledger.consumed, ledger.not_applied):
        with pytest.raises(LedgerError, match="was never admitted"):
            change([SampleKey(*archived[0], 0)], 1, *["reason"] * (change == ledger.not_applied))
    assert [row[0] for row in rows(run.path, "SELECT handed_out FROM cursor")] == [first[0], second[0]]


FIRST = "rowid = (SELECT min(rowid) FROM samples)"
BROKEN = {
    f"UPDATE samples SET version = step WHERE {FIRST}": "nothing newer than the policy",
    f"UPDATE samples SET attempt = 9 WHERE {FIRST}": "numbered consecutively",
    f"DELETE FROM samples WHERE {FIRST}": "cannot archive row|has 7 of 8 samples",
    f"UPDATE samples SET row = (row + 1) % 5, epoch = 99 WHERE {FIRST}": "cannot archive row",
    "UPDATE samples SET epoch = 99 WHERE rowid <= 2": "cannot archive row",
    f"UPDATE samples SET step = step + 1, version = step WHERE {FIRST}": "cannot archive row",
}


@pytest.mark.parametrize("harm", BROKEN)
def test_a_block_that_breaks_an_invariant_is_not_archived_and_ends_the_run(tmp_path, harm):
    tmp_path = tmp_path / "run"
    tmp_path.mkdir()
    run = SimulatedRun(tmp_path, SMALL)
    for _ in range(6):
        run.train()
    with closing(sqlite3.connect(run.path)) as db, db:
        assert db.execute(harm).rowcount > 0
    with pytest.raises(LedgerError, match=BROKEN[harm]):
        run.ledger.mark_committed()
    assert rows(run.path, "SELECT * FROM archive") == []


FALSE = {
    "UPDATE archive SET committed = committed - 6 WHERE block = 2": "blocks of 8 samples without a gap",
    "UPDATE cursor SET archived = archived + 1 WHERE source = 0": "the samples of the archived prompts",
    "UPDATE cursor SET archived = archived + 1 - 2 * source": "that the data cursor handed out is in the ledger",
    "UPDATE archived_steps SET step = step + 1": "each update consumed one batch",
    "UPDATE archived_steps SET step = step - 1": "without a gap",
    f"DELETE FROM samples WHERE {FIRST}": "has its 2 samples",
    "UPDATE samples SET step = 1, version = 0 WHERE step IS NOT NULL": "without a gap",
    f"INSERT INTO samples SELECT 0, 0, 0, 1, 'committed', {5}, 'w', {6}, NULL": "has not handed out row 0 of epoch 0",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = run_of(tmp_path_factory.mktemp("finished") / "run", steps=13)
    assert rows(run.path, "SELECT * FROM archived_steps")
    return run.path


def harmed(finished, place, harm):
    path = shutil.copy(finished, place)
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(harm).rowcount > 0
    return place / finished.name


@pytest.mark.parametrize("harm", FALSE)
def test_an_archive_that_does_not_add_up_with_the_rows_is_found(finished, tmp_path, harm):
    with closing(open_for_reading(harmed(finished, tmp_path, harm))) as db:
        assert FALSE[harm] in " ".join(f"{p.invariant} {p.violation}" for p in audit(db, ended=True))


@pytest.mark.parametrize("harm", ["UPDATE archive SET committed = committed + 1 WHERE block = 1",
                                  "DELETE FROM archive WHERE block = 2"])
def test_counts_of_the_archive_that_are_impossible_are_an_error(finished, tmp_path, harm):
    with (closing(open_for_reading(harmed(finished, tmp_path, harm))) as db,
          pytest.raises(LedgerError, match="does not agree with the updates")):
        audit(db, ended=True)


def test_what_was_quarantined_is_known_from_the_archive_by_prompt(tmp_path):
    facts = replace(SMALL, max_staleness=1)
    archived = run_of(tmp_path / "archived", facts, quarantines=0.3).path
    whole = run_of(tmp_path / "whole", replace(facts, block_samples=10_000), quarantines=0.3).path
    with closing(Ledger(archived)) as mine, closing(Ledger(whole)) as other:
        found, wanted = mine.quarantined(), other.quarantined()
    assert found.samples == wanted.samples == len(wanted.keys) and found.reasons == wanted.reasons
    assert len(found.keys) < len(wanted.keys) and all(key in found for key in wanted.keys)
    handed_out = [SampleKey(*key) for key in rows(whole, "SELECT epoch, row, sample FROM samples WHERE state = "
                                                         "'committed'")]
    assert not any(key in found for key in handed_out if key.epoch > found.archived.get(key.row, -1))


def test_attempts_lost_at_samples_that_the_checkpoint_has_archived_are_not_counted_again(tmp_path):
    """A ledger that is older than the checkpoint, as where a checkpoint was fetched from another place."""
    run = run_of(tmp_path / "run", steps=2)
    old = tmp_path / "old.sqlite"
    old.write_bytes(run.path.read_bytes())
    newer = run_of(tmp_path / "newer", steps=20)
    counted = []
    for path in (old, tmp_path / "none.sqlite"):
        Ledger.resume(path, newer.place / "copy.sqlite", SMALL).close()
        with closing(open_for_reading(path)) as db:
            counted.append(counts(db)["attempts given up"])
    assert counted[0] == counted[1]
