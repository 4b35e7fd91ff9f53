"""The ledger: what a sample's life may be, what survives a process, and what a resumed run goes on from."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from rlhf_ray.errors import LedgerError
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import audit, counts
from rlhf_ray.replay.ledger import LOST, Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.unit.replay.ledgers import begin

FACTS = LedgerFacts(samples_per_step=4, samples_per_prompt=2, max_staleness=1, source_rows=(3, 2), seed=0,
                    shuffle=False, weights=(3.0, 2.0))


def keys(*rows, epoch=0):
    return [SampleKey(epoch, row, sample) for row in rows for sample in range(2)]


def trained(ledger, chosen, step, version=None):
    """From admission to the update `step`."""
    version = step - 1 if version is None else version
    begin(ledger, chosen, version)
    ledger.generated(chosen, "generator/0")
    ledger.scored(chosen, version)
    ledger.consumed(chosen, step)


def table(path, name="samples"):
    with closing(open_for_reading(path)) as db:
        return sorted(db.execute(f"SELECT * FROM {name}").fetchall(), key=lambda row: row[:3])


def wrong(path, ended=False):
    with closing(open_for_reading(path)) as db:
        return audit(db, ended)


@pytest.fixture
def ledger(tmp_path):
    return Ledger.create(tmp_path / "ledger.sqlite", FACTS)


def test_an_episode_that_did_not_complete_is_consumed_with_its_reason(ledger):
    two = keys(0)
    begin(ledger, two, 0)
    ledger.generated(two, "episode_runner/0")
    ledger.scored(two, 0, [None, "error_timeout, masked"])
    ledger.consumed(two, 1)
    found = [(row[4], row[8]) for row in table(ledger.path)]
    assert found == [("consumed", None), ("consumed", "error_timeout, masked")]


def test_a_sample_goes_from_admission_to_its_update_and_is_committed_with_the_checkpoint(ledger, tmp_path):
    trained(ledger, keys(0, 3), 1)
    begin(ledger, keys(1), 1)
    ledger.save(tmp_path / "copy.sqlite")
    assert [row[4] for row in table(ledger.path)] == ["consumed"] * 2 + ["leased"] * 2 + ["consumed"] * 2
    assert [row[4] for row in table(tmp_path / "copy.sqlite")] == ["committed"] * 2 + ["leased"] * 2 + ["committed"] * 2
    ledger.mark_committed()
    assert table(ledger.path) == table(tmp_path / "copy.sqlite")
    assert table(ledger.path)[0] == (0, 0, 0, 1, "committed", 0, "generator/0", 1, None)
    assert not wrong(ledger.path)


@pytest.mark.parametrize("step", ["start_attempt", "generated", "consumed", "give_up"])
def test_a_step_out_of_order_is_refused_and_changes_nothing(ledger, step):
    begin(ledger, keys(0), 0)
    ledger.generated(keys(0), "generator/0")
    if step == "give_up":
        ledger.scored(keys(0), 0)
        ledger.consumed(keys(0), 1)
    before = table(ledger.path)
    arguments = {"start_attempt": 0, "generated": "generator/1", "consumed": 1, "give_up": "reason"}
    with pytest.raises(LedgerError, match="a sample came twice, or was never admitted"):
        getattr(ledger, step)(keys(0), arguments[step])
    assert table(ledger.path) == before and not table(ledger.path, "attempts")


def test_an_attempt_given_up_is_remembered_and_the_next_has_a_number_of_its_own(ledger):
    begin(ledger, keys(0), 0)
    ledger.generated(keys(0), "generator/1")
    ledger.give_up(keys(0), "stale")
    assert table(ledger.path) == [(0, 0, n, 2, "admitted", None, None, None, None) for n in range(2)]
    assert table(ledger.path, "attempts")[0] == (0, 0, 0, 1, "generated", "generator/1", "stale")
    assert not wrong(ledger.path)
    ledger.start_attempt(keys(0), 1)
    assert [row[3] for row in table(ledger.path)] == [2, 2]
    assert not wrong(ledger.path)
    ledger.leave_unused(keys(0), "the run ended")
    assert [row[4:] for row in table(ledger.path)] == [("unused", 1, None, None, "the run ended")] * 2
    assert not wrong(ledger.path, ended=True)


def test_a_resumed_run_goes_on_from_the_copy_and_remembers_what_was_lost(ledger, tmp_path):
    trained(ledger, keys(0, 3), 1)
    begin(ledger, keys(1), 1)  # under way when the run was saved
    begin(ledger, keys(2), 1)
    ledger.generated(keys(2), "generator/0")
    ledger.scored(keys(2), 1)  # whole: its experience is in the checkpoint
    ledger.save(tmp_path / "copy.sqlite")
    ledger.generated(keys(1), "generator/0")
    ledger.scored(keys(1), 1)
    ledger.consumed(keys(1, 2), 2)
    begin(ledger, keys(0, 1, epoch=1), 2)  # after the checkpoint: the copy knows nothing of these
    again = Ledger.resume(ledger.path, tmp_path / "copy.sqlite", FACTS)
    with closing(open_for_reading(again.path)) as db:
        assert counts(db) == {"admitted": 2, "leased": 0, "generated": 0, "scored": 2, "consumed": 0, "committed": 4,
                              "not_applied": 0, "quarantined": 0, "filtered": 0, "unused": 0, "attempts given up": 6}
    assert {row[6] for row in table(again.path, "attempts")} == {LOST}
    again.start_attempt(keys(1), 1)
    assert [row[3] for row in table(again.path)] == [1, 1, 2, 2, 1, 1, 1, 1]
    assert not wrong(again.path)


def test_what_was_admitted_after_the_copy_and_never_begun_is_no_attempt(ledger, tmp_path):
    ledger.save(tmp_path / "copy.sqlite")
    ledger.admit(keys(0, 3), [1, 1])
    begin(ledger, keys(1))
    again = Ledger.resume(ledger.path, tmp_path / "copy.sqlite", FACTS)
    assert {row[1] for row in table(again.path, "attempts")} == {1} and table(again.path) == []
    assert table(again.path, "cursor") == [(0, 0, 0), (1, 0, 0)] and not wrong(again.path)


def test_whole_experience_that_was_given_up_after_the_copy_goes_on_under_a_number_of_its_own(ledger, tmp_path):
    begin(ledger, keys(0, 3), 0)
    ledger.generated(keys(0, 3), "generator/0")
    ledger.scored(keys(0, 3), 0)
    ledger.save(tmp_path / "copy.sqlite")
    ledger.give_up(keys(0), "stale")
    again = Ledger.resume(ledger.path, tmp_path / "copy.sqlite", FACTS)
    assert {row[:2] for row in again._db.execute("SELECT row, attempt FROM samples")} == {(0, 2), (3, 1)}
    assert not wrong(again.path)
    again.give_up(keys(0), "stale again")
    again.consumed(keys(3), 1)


@pytest.mark.parametrize("damage", ["gone", "garbage"])
def test_a_lost_or_damaged_file_beside_a_whole_copy_costs_nothing_that_counts(ledger, tmp_path, damage):
    trained(ledger, keys(0, 3), 1)
    ledger.save(tmp_path / "copy.sqlite")
    ledger.close()
    ledger.path.unlink()
    if damage == "garbage":
        ledger.path.write_bytes(b"no ledger" * 1000)
    again = Ledger.resume(ledger.path, tmp_path / "copy.sqlite", FACTS)
    assert table(again.path) == table(tmp_path / "copy.sqlite")


def test_a_copy_of_a_run_with_other_facts_is_refused(ledger, tmp_path):
    ledger.save(tmp_path / "copy.sqlite")
    other = LedgerFacts(4, 2, 1, (5,), 0, False, (1.0,))
    with pytest.raises(LedgerError, match=r"source_rows was \(3, 2\) and is \(5,\)"):
        Ledger.resume(tmp_path / "new.sqlite", tmp_path / "copy.sqlite", other)


def test_a_damaged_ledger_is_refused_by_name(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"no ledger" * 1000)
    with pytest.raises(LedgerError, match=r"ledger.sqlite cannot be read"):
        open_for_reading(tmp_path / "ledger.sqlite")
    with pytest.raises(LedgerError, match=r"ledger.sqlite cannot be opened"):
        Ledger(tmp_path / "ledger.sqlite")


KILLED = """
import sys
from pathlib import Path
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.ledger import Ledger
ledger, number = Ledger(Path(sys.argv[1])), 0
while True:
    keys = [SampleKey(number, row, sample) for row in range(5) for sample in range(2)]
    ledger.admit(keys, [3 * number + 3, 2 * number + 2])
    print(number, flush=True)
    number += 1
"""


def test_a_process_killed_while_it_writes_leaves_whole_transactions(ledger):
    ledger.close()
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(ledger.path)], stdout=subprocess.PIPE, text=True)
    while int(process.stdout.readline()) < 20:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    written = table(ledger.path)
    assert len(written) % 10 == 0 and len(written) >= 210
    assert [problem.invariant for problem in wrong(ledger.path)] == ["at most 8 samples are open or unused, which is 2 "
                                                                     "batches"], "the position is as far as the samples"


def test_a_copy_that_cannot_be_made_is_said_as_such(ledger, tmp_path):
    with pytest.raises(LedgerError, match="cannot be copied: unable to open database file"):
        ledger.save(tmp_path / "missing" / "copy.sqlite")


def test_a_full_disk_is_said_as_such(ledger):
    ledger._db.execute("PRAGMA max_page_count=8")
    with pytest.raises(LedgerError, match="cannot be written: database or disk is full"):
        for epoch in range(1000):
            begin(ledger, keys(0, 1, 2, epoch=epoch), 0)


def test_a_closed_ledger_is_one_file_also_after_it_was_read(ledger):
    begin(ledger, keys(0), 0)
    ledger.close()
    assert len(table(ledger.path)) == 2
    assert [path.name for path in ledger.path.parent.iterdir()] == ["ledger.sqlite"]


def test_others_read_while_the_run_writes(ledger):
    begin(ledger, keys(0), 0)
    with closing(open_for_reading(ledger.path)) as db:
        ledger.generated(keys(0), "generator/0")
        assert counts(db)["generated"] == 2
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("DELETE FROM samples")


def test_a_reader_in_the_middle_of_its_reading_stops_neither_the_run_nor_its_end(ledger):
    begin(ledger, keys(0), 0)
    with closing(open_for_reading(ledger.path)) as db:
        db.execute("BEGIN")
        assert counts(db)["leased"] == 2
        begin(ledger, keys(1), 0)
        ledger.close()
        assert counts(db)["leased"] == 2, "as when it began to read"
    assert len(table(ledger.path)) == 4


def hold(path):
    """A connection that keeps a ledger locked, as a shell does in the middle of a change."""
    db = sqlite3.connect(path, check_same_thread=False)
    db.execute("BEGIN IMMEDIATE")
    return db


def test_a_lock_is_waited_for_and_one_that_stays_is_told(ledger, monkeypatch):
    ledger.close()
    monkeypatch.setattr("rlhf_ray.replay.ledger.LOCKED_S", 1.0)
    ledger = Ledger(ledger.path)
    holder = hold(ledger.path)
    letting_go = threading.Timer(0.3, holder.rollback)
    letting_go.start()
    begin(ledger, keys(0), 0)
    letting_go.join()
    with closing(holder), pytest.raises(LedgerError, match="locked; another program has locked it"):
        holder.execute("BEGIN IMMEDIATE")
        ledger.generated(keys(0), "generator/0")


def test_with_a_thread_changes_are_made_in_order_a_copy_is_of_its_moment_and_a_failure_stays(tmp_path):
    thread, began = FileThread("test", 60.0), threading.Event()
    ledger = Ledger.create(tmp_path / "ledger.sqlite", FACTS, thread=thread)

    async def run():
        thread.submit(began.wait, 10)  # a disk that is busy: all that follows waits
        begin(ledger, keys(0, 1), 0)
        ledger.generated(keys(0, 1), "generator/0")
        copy = ledger.save(tmp_path / "copy.sqlite")
        ledger.scored(keys(0), 0)
        assert states(ledger.path) == {}
        began.set()
        await thread.wait(copy)
        await ledger.settled()
        assert states(tmp_path / "copy.sqlite") == {"generated": 4}
        assert states(ledger.path) == {"generated": 2, "scored": 2}
        ledger.scored(keys(1), 0)
        ledger.consumed(keys(0, 3), 1)  # there is no 3
        with pytest.raises(LedgerError, match="4 samples should become consumed, and 2 of them"):
            await ledger.settled()
        with pytest.raises(LedgerError, match="4 samples should become consumed"):
            ledger.start_attempt(keys(4), 0)
        assert states(ledger.path) == {"scored": 4}, "those before it are made"

    asyncio.run(run())


def test_with_a_thread_what_is_noted_after_a_copy_was_asked_for_is_on_disk_when_it_is_settled(tmp_path):
    thread, began, copying = FileThread("test", 60.0), threading.Event(), threading.Event()
    ledger = Ledger.create(tmp_path / "ledger.sqlite", FACTS, thread=thread)

    async def run():
        thread.submit(began.wait, 10)
        begin(ledger, keys(0), 0)
        ledger.save(tmp_path / "copy.sqlite")
        thread.submit(copying.wait, 0.2)  # what comes after it is late
        begin(ledger, keys(1), 0)
        began.set()
        await ledger.settled()
        assert states(ledger.path) == {"leased": 4}

    asyncio.run(run())


def states(path):
    with closing(open_for_reading(path)) as db:
        return dict(db.execute("SELECT state, count(*) FROM samples GROUP BY state"))
