"""A ledger on a file system that several machines may share: no write-ahead log; and one whose run was taken over."""

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rlhf_ray.errors import LedgerError, SupersededError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.audit import counts
from rlhf_ray.replay.ledger import Ledger, discard, file_system_of, is_local, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from tests.unit.owners import take_over
from tests.unit.replay.ledgers import begin

FACTS = LedgerFacts(2, 1, 0, (9,), 0, False, (1.0,))
MOUNTS = r"""22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:40 / /shared rw,relatime shared:9 master:2 - nfs4 server:/x rw
41 40 0:41 / /shared/scratch rw - tmpfs tmpfs rw
42 22 0:42 / /with\040space rw - fuse.sshfs host:/ rw
43 22 0:43 / /twice rw - ext4 /dev/vdb rw
44 43 0:44 / /twice rw - cifs //host/share rw
"""


@pytest.fixture
def shared(monkeypatch):
    """Every file is taken to lie on a network file system."""
    monkeypatch.setattr("rlhf_ray.replay.ledger.is_local", lambda _: False)


def lease(ledger, row):
    begin(ledger, [SampleKey(0, row, 0)])


def journal_mode(path):
    with closing(sqlite3.connect(path)) as db:
        return db.execute("PRAGMA journal_mode").fetchone()[0]


@pytest.mark.parametrize(("path", "kind"), [
    ("/home/x", "ext4"), ("/shared/runs/a", "nfs4"), ("/shared/scratch/a", "tmpfs"), ("/sharedness", "ext4"),
    ("/with space/a", "fuse.sshfs"), ("/twice/a", "cifs")])
def test_the_kind_of_file_system_is_that_of_the_deepest_mount(tmp_path, monkeypatch, path, kind):
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr("rlhf_ray.replay.ledger._MOUNTS", tmp_path / "mounts")
    assert file_system_of(Path(path)) == kind and is_local(Path(path)) is (kind in ("ext4", "tmpfs"))


@pytest.mark.parametrize(("kinds", "local"), [
    ("ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs tmpfs ramfs overlay aufs ntfs3 exfat vfat", True),
    ("nfs nfs4 cifs smb3 lustre gpfs ceph beegfs 9p virtiofs fuse.sshfs", False)])
def test_a_log_is_kept_on_file_systems_of_one_machine_only(tmp_path, monkeypatch, kinds, local):
    monkeypatch.setattr("rlhf_ray.replay.ledger._MOUNTS", tmp_path / "mounts")
    for kind in kinds.split():
        (tmp_path / "mounts").write_text(f"44 43 0:44 / / rw - {kind} device rw\n")
        assert is_local(Path("/home")) is local, kind


def test_where_nothing_is_known_no_log_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_ray.replay.ledger._MOUNTS", tmp_path / "none")
    assert is_local(tmp_path) is False


def test_a_shared_ledger_has_no_log_at_any_moment_and_is_read_while_it_is_written(tmp_path, shared):
    ledger = Ledger.create(tmp_path / "ledger.sqlite", FACTS)
    for row in range(3):
        lease(ledger, row)
        assert not list(tmp_path.glob("*-wal")) and not list(tmp_path.glob("*-shm"))
        with closing(open_for_reading(ledger.path)) as db:
            assert counts(db)["leased"] == row + 1
    ledger.save(tmp_path / "copy.sqlite")
    ledger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.sqlite", "ledger.sqlite"]
    with closing(Ledger.resume(ledger.path, tmp_path / "copy.sqlite", FACTS)):
        assert not list(tmp_path.glob("*-wal"))


def killed(tmp_path):
    """A ledger as a run leaves it that is killed on a local file system: two of its samples are in the log alone."""
    ledger = Ledger.create(tmp_path / "ledger.sqlite", FACTS)
    lease(ledger, 0)
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    lease(ledger, 1)
    lease(ledger, 2)
    place = tmp_path / "copied"
    place.mkdir()
    for side in ("", "-wal"):
        shutil.copy(tmp_path / f"ledger.sqlite{side}", place / f"ledger.sqlite{side}")
    ledger.close()
    return place / "ledger.sqlite"


def test_a_log_that_was_brought_to_a_shared_file_system_is_read_there(tmp_path, shared, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_ray.replay.ledger.is_local", lambda _: True)
        path = killed(tmp_path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with closing(open_for_reading(path)) as db:
        assert counts(db)["leased"] == 3
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("DELETE FROM samples")
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_and_is_converted_when_it_is_opened_for_writing(tmp_path, shared, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_ray.replay.ledger.is_local", lambda _: True)
        path = killed(tmp_path)
    ledger = Ledger(path)
    lease(ledger, 3)
    assert not list(path.parent.glob("*-wal")) and not list(path.parent.glob("*-shm"))
    with closing(open_for_reading(path)) as db:
        assert counts(db)["leased"] == 4
    ledger.close()
    assert journal_mode(path) == "delete"


def test_a_damaged_log_on_a_shared_file_system_is_refused_by_name(tmp_path, shared):
    (tmp_path / "ledger.sqlite").write_bytes(b"SQLite format 3\0\x10\0\x02\x02" + bytes(5000))
    with pytest.raises(LedgerError):
        open_for_reading(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("local", [True, False], ids=["with a log", "with a journal"])
def test_a_superseded_driver_marks_no_update_and_what_it_writes_does_not_reach_its_successors_ledger(
        tmp_path, monkeypatch, local):
    monkeypatch.setattr("rlhf_ray.replay.ledger.is_local", lambda _: local)
    monkeypatch.setattr("rlhf_ray.observability.run_directory.claim", lambda directory, *_: take_over(directory, "a"))
    run, copy = RunDirectory(tmp_path), tmp_path / "copy"
    with run.owned():
        mine = Ledger.create(run.ledger, FACTS, run.term)
        lease(mine, 0)
        mine.save(copy)
        theirs = Ledger.resume(run.ledger, copy, FACTS, take_over(tmp_path))
        lease(theirs, 1)
        with suppress(SupersededError):
            lease(mine, 2)
        key = [SampleKey(0, 2, 0)]
        for write in (lambda: mine.consumed(key, 1), lambda: mine.not_applied(key, 1, "no number"),
                      lambda: mine.save(tmp_path / "late"), lambda: mine.mark_committed(1), mine.close):
            with pytest.raises(SupersededError):
                write()
        with pytest.raises(sqlite3.ProgrammingError):
            mine._db.execute("SELECT 1")
        lease(theirs, 3)
    with closing(open_for_reading(run.ledger)) as db:
        assert [row for row, in db.execute("SELECT row FROM samples WHERE state = 'leased' ORDER BY row")] == [1, 3]
        assert db.execute("SELECT value FROM facts WHERE name = 'term'").fetchone() == (2,)


@pytest.mark.parametrize("local", [True, False], ids=["with a log", "with a journal"])
def test_a_write_that_passes_its_check_and_comes_late_is_lost_with_the_old_file(tmp_path, monkeypatch, local):
    monkeypatch.setattr("rlhf_ray.replay.ledger.is_local", lambda _: local)
    mine = Ledger.create(tmp_path / "ledger.sqlite", FACTS)
    lease(mine, 0)
    mine.save(tmp_path / "copy")
    mine._db.execute("BEGIN IMMEDIATE")
    mine._db.execute("INSERT INTO samples (epoch, row, sample, attempt, state) VALUES (0, 5, 0, 1, 'leased')")
    theirs = Ledger.resume(tmp_path / "ledger.sqlite", tmp_path / "copy", FACTS)
    lease(theirs, 1)
    mine._db.commit()
    lease(theirs, 2)
    mine._db.close()
    lease(theirs, 3)
    with closing(open_for_reading(theirs.path)) as db:
        assert [row for row, in db.execute("SELECT row FROM samples WHERE state = 'leased' ORDER BY row")] == [1, 2, 3]
    theirs.close()
    with closing(open_for_reading(theirs.path)) as db:
        assert counts(db)["leased"] == 3


def test_a_discarded_ledger_leaves_nothing_that_another_one_would_take_up(tmp_path):
    for side in ("", "-wal", "-shm", "-journal"):
        (tmp_path / f"ledger.sqlite{side}").write_bytes(b"old")
    discard(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []
