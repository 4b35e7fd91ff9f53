"""The ledger: the state of every sample that a run has admitted, in one SQLite file.

A sample keeps its key (epoch, row, sample) from the moment when the data cursor hands its prompt out; attempts to
generate it are numbered. Its life cycle:

    admitted ──► leased ──► generated ──► scored ──► consumed(step) ──► committed    the step is in a checkpoint
       ▲           │            │           │ └────► not_applied(step, reason)       the step changed no weight
       │           │            ├───────────┼──────► filtered(reason)                dynamic sampling left it out
       └───────────┴────────────┴───────────┤   the attempt is given up, and another follows
                                            ├──► quarantined(reason)                 there will be no other
                                            └──► unused(reason)                      the run ended before its turn

The cursor's position is written in one transaction with the samples it handed out, so that at any moment the ledger
holds exactly these samples.

Samples that are settled leave the table in blocks (`archive`), so that file and copy do not grow with the run.

The running process keeps `ledger.sqlite` up to date, so that other processes can read it: with a write-ahead log on a
file system of one machine, with a rollback journal on a shared one. A checkpoint holds a copy in which everything
consumed is committed: manifest, weights, data cursor and ledger become valid by one rename. A resumed run starts from
that copy; attempts made after it are recorded as lost (but for those at samples that have been archived since, which
can only be where a checkpoint before the newest is resumed).
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rlhf_ray.errors import LedgerError
from rlhf_ray.files.fsync import flushing
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.archive import archive_settled
from rlhf_ray.replay.ledger_tables import (
    CREATE,
    OPEN,
    SCHEMA,
    UNDER_WAY,
    LedgerFacts,
    State,
    archived_prompts,
    contents,
    reading_errors,
)
from rlhf_ray.replay.prompt_order import PromptPlaces

LOCAL_FILE_SYSTEMS = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs", "ramfs", "overlay",
    "aufs", "ntfs3", "exfat", "vfat"})
"""File systems of one machine; SQLite's write-ahead log works on these alone, since its index is memory that processes
share (https://www.sqlite.org/wal.html: "All processes using a database must be on the same host computer; WAL does not
work over a network filesystem"). All others (nfs4, cifs, lustre, gpfs, ceph, beegfs, 9p, virtiofs, fuse.*) may be
shared by several machines."""
_MOUNTS = Path("/proc/self/mountinfo")
LOCKED_S = 60.0
"""Longest wait for a lock that another program holds. Readers (`open_for_reading`) never hold one for long."""
LOST = "the process ended before the next checkpoint"
UNMADE = "FROM samples WHERE state IN ('leased', 'generated')"
"""Samples whose experience is incomplete; a checkpoint holds the bytes of those that are scored."""

Change = Callable[[sqlite3.Connection], Any]


@dataclass(frozen=True)
class Quarantined:
    """The samples of a ledger that were set aside."""

    samples: int
    """Their number."""
    reasons: dict[int, str]
    """First reason by row of the data."""
    keys: frozenset[SampleKey]
    """Those that are not archived."""
    archived: dict[int, int]
    """Row of a prompt with archived ones -> the last epoch in which it has some."""

    def __contains__(self, key: SampleKey) -> bool:
        return key in self.keys or key.epoch <= self.archived.get(key.row, -1)


class Ledger:
    """A run's ledger, open for writing. Not thread-safe: for the coordinator's event loop only.

    With a file thread, methods that write queue the change and return at once; the thread makes the changes in the same
    order, all that wait in one transaction, and `settled` returns when they are on disk. Without one, each change is a
    transaction of its own, made when the method returns. Either way a process killed at any moment leaves a readable
    file.

    Raises:
        LedgerError: (any method that writes, and `settled`) the file cannot be read or written, or a sample is not in
            the required state; later changes are not written then.
        SupersededError: (the same, after a method about an update or a checkpoint) another driver owns the run's
            directory now. It has replaced this file by a new one, which a late write does not reach.
    """

    def __init__(self, path: Path, term: Term | None = None, thread: FileThread | None = None) -> None:
        """Open an existing ledger; see `create`. `term`: of the owner of the run's directory, stored in the ledger."""
        self.path, self._term, self._thread = Path(path), term, thread
        self._changes: deque[Change | None] = deque()
        """Queued for the thread. None: copy the ledger as of the changes before it."""
        self._newest_job: Future[None] | None = None
        """The newest job that makes changes."""
        self._job_queued = False
        """Whether a queued job will see every change queued by now."""
        self._failure: BaseException | None = None
        with self._converted_errors("opened"):
            # One thread at a time uses the connection: during the run the file thread, if there is one.
            self._db = sqlite3.connect(_uri(self.path, "rw"), uri=True, timeout=LOCKED_S, check_same_thread=False)
            if is_local(self.path):
                self._db.execute("PRAGMA journal_mode=WAL")
            else:
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # a log left behind then needs no shared memory
                self._db.execute("PRAGMA journal_mode=TRUNCATE")
                self._db.execute("PRAGMA locking_mode=NORMAL")
            self._db.execute("PRAGMA synchronous=NORMAL")  # survives the process; a checkpoint's copy is flushed
            check_ledger(self._db, self.path)
            self._places = PromptPlaces(LedgerFacts.read(self._db))
        if term is not None:
            self._apply([lambda db: db.execute("INSERT OR REPLACE INTO facts VALUES ('term', ?)", (term.number,))])

    @classmethod
    def create(cls, path: Path, facts: LedgerFacts, term: Term | None = None, thread: FileThread | None = None) -> Self:
        """An empty ledger at `path`, which must be free."""
        if path.exists():
            raise LedgerError(f"{path} exists already and would be overwritten; resume the run, or choose another "
                              "run.dir")
        try:
            with closing(sqlite3.connect(path)) as db:
                db.executescript(CREATE)
                db.executemany("INSERT INTO facts VALUES (?, ?)", [("schema", SCHEMA), *facts.rows()])
                db.executemany("INSERT INTO cursor VALUES (?, 0, 0)", [(n,) for n in range(len(facts.source_rows))])
                db.commit()
        except sqlite3.Error as error:
            raise LedgerError(f"{path} cannot be created: {error}; check the directory and the free space") from error
        return cls(path, term, thread)

    @classmethod
    def resume(cls, path: Path, copy: Path, facts: LedgerFacts, term: Term | None = None,
               thread: FileThread | None = None) -> Self:
        """Continue from a checkpoint's copy; attempts that were under way then, or made later, are recorded as lost.

        Raises:
            LedgerError: the copy is of a run with other facts, or unreadable.
        """
        lost = _attempts_beyond(path, copy)
        discard(path)
        with closing(open_for_reading(copy)) as source, closing(sqlite3.connect(path)) as target:
            source.backup(target)
        ledger = cls(path, term, thread)
        saved = LedgerFacts.read(ledger._db)
        loosest = replace(facts, max_staleness=max(facts.max_staleness, saved.max_staleness),
                          filters=facts.filters or saved.filters)
        if replace(saved, max_staleness=loosest.max_staleness, filters=loosest.filters) != loosest:
            other = [f"{name} was {value} and is {getattr(facts, name)}" for name, value in asdict(saved).items()
                     if name not in ("max_staleness", "filters") and value != getattr(facts, name)]
            raise LedgerError(f"{copy} is the ledger of another run: {'; '.join(other)} (source_rows: usable prompts "
                              "of each data set). Resume with the same settings and data, or start a new run")

        def reopen(db: sqlite3.Connection) -> None:
            db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", loosest.rows())
            db.execute(f"INSERT OR REPLACE INTO attempts SELECT epoch, row, sample, attempt, state, worker, ? {UNMADE}",
                       (LOST,))
            db.execute("UPDATE samples SET state = ?, version = NULL, worker = NULL WHERE rowid IN (SELECT rowid "
                       f"{UNMADE})", (State.ADMITTED,))
            archived = archived_prompts(db)
            db.executemany("INSERT OR IGNORE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", (
                (epoch, row, *more) for epoch, row, *more in lost if not ledger._places.precedes(epoch, row, archived)))
            db.execute("UPDATE samples SET attempt = 1 + (SELECT count(*) FROM attempts AS a WHERE (a.epoch, a.row, "
                       "a.sample) = (samples.epoch, samples.row, samples.sample)) WHERE state IN (?, ?)",
                       (State.SCORED, State.ADMITTED))

        ledger._apply([reopen])
        return ledger

    def admit(self, keys: Iterable[SampleKey], position: Sequence[int]) -> None:
        """Record the samples of prompts that the data cursor has handed out, and its new position: prompts handed out
        of each source, over all its epochs."""
        rows = [(*key.numbers, State.ADMITTED) for key in keys]
        prompts = dict.fromkeys(row[:2] for row in rows)
        counts = [(count, source) for source, count in enumerate(position)]

        def change(db: sqlite3.Connection) -> None:
            if any(archived := archived_prompts(db)):
                for epoch, row in prompts:
                    if self._places.precedes(epoch, row, archived):
                        raise LedgerError(f"{self.path}: row {row} of epoch {epoch} was admitted twice: its samples "
                                          "are in the archive. This is a bug; report it")
            db.executemany(
                "INSERT INTO samples (epoch, row, sample, attempt, state) VALUES (?1, ?2, ?3, 1 + (SELECT "
                "count(*) FROM attempts WHERE epoch = ?1 AND row = ?2 AND sample = ?3), ?4)", rows)
            db.executemany("UPDATE cursor SET handed_out = ? WHERE source = ?", counts)

        self._write(change)

    def start_attempt(self, keys: Iterable[SampleKey], version: int) -> None:
        """Start an attempt at admitted samples, with weights of `version`."""
        self._move(keys, State.LEASED, (State.ADMITTED,), version=version)

    def generated(self, keys: Iterable[SampleKey], worker: str) -> None:
        """`worker` has generated the responses."""
        self._move(keys, State.GENERATED, (State.LEASED,), worker=worker)

    def scored(self, keys: Sequence[SampleKey], min_version: int, reasons: Sequence[str | None] | None = None) -> None:
        """The samples' experience is complete; `min_version` is the oldest version among its tokens.

        Args:
            reasons: of each, what an episode did not complete for, and what follows; None for one that completed.
        """
        for reason in dict.fromkeys(reasons or [None]):
            alike = keys if reasons is None else [
                key for key, its in zip(keys, reasons, strict=True) if its == reason]
            self._move(alike, State.SCORED, (State.GENERATED,), version=min_version, reason=reason)

    def consumed(self, keys: Iterable[SampleKey], step: int) -> None:
        """Update number `step` (from 1) has consumed the samples."""
        self._write(self._owned(self._moving(keys, State.CONSUMED, (State.SCORED,), step=step)))

    def not_applied(self, keys: Iterable[SampleKey], step: int, reason: str) -> None:
        """Update number `step` has consumed the samples and changed no weight: they were not trained on."""
        self._write(self._owned(self._moving(keys, State.NOT_APPLIED, (State.SCORED,), step=step, reason=reason)))

    def quarantine(self, keys: Iterable[SampleKey], reason: str) -> None:
        """Set the samples aside; no attempt follows."""
        self._move(keys, State.QUARANTINED, UNDER_WAY, reason=reason)

    def filter(self, keys: Iterable[SampleKey], reason: str) -> None:
        """Dynamic sampling has left the samples out; no attempt follows."""
        self._move(keys, State.FILTERED, (State.GENERATED,), reason=reason)

    def quarantined(self) -> Quarantined:
        """The samples that were set aside."""
        rows = self._db.execute("SELECT epoch, row, sample, reason FROM samples WHERE state = ? ORDER BY 1, 2, 3",
                                (State.QUARANTINED,)).fetchall()
        archived = self._db.execute("SELECT row, epoch, reason FROM archived_quarantine").fetchall()
        number, = self._db.execute("SELECT coalesce(sum(quarantined), 0) FROM archive").fetchone()
        reasons = {row: reason for row, _, reason in archived}
        for _, row, _, reason in rows:
            reasons.setdefault(row, reason)
        return Quarantined(number + len(rows), reasons, frozenset(SampleKey(*key) for *key, _ in rows),
                           {row: epoch for row, epoch, _ in archived})

    def open_keys(self) -> set[SampleKey]:
        """The samples that no update has consumed yet."""
        marks = ", ".join("?" * len(OPEN))
        rows = self._db.execute(f"SELECT epoch, row, sample FROM samples WHERE state IN ({marks})", OPEN)
        return {SampleKey(*key) for key in rows}

    def position(self) -> list[int]:
        """Position of the data cursor: prompts handed out of each source."""
        return [count for (count,) in self._db.execute("SELECT handed_out FROM cursor ORDER BY source")]

    def give_up(self, keys: Iterable[SampleKey], reason: str) -> None:
        """End the present attempt at these samples without success; another follows."""
        plain = [(*key.numbers, reason) for key in keys]

        def change(db: sqlite3.Connection) -> None:
            moved = db.executemany(
                "INSERT INTO attempts SELECT epoch, row, sample, attempt, state, worker, ?4 FROM samples WHERE "
                "epoch = ?1 AND row = ?2 AND sample = ?3 AND state IN ('leased', 'generated', 'scored')", plain)
            self._require(moved.rowcount, len(plain), "given up", UNDER_WAY)
            db.executemany("UPDATE samples SET state = ?, attempt = attempt + 1, version = NULL, worker = NULL WHERE "
                           "epoch = ? AND row = ? AND sample = ?", [(State.ADMITTED, *key[:3]) for key in plain])

        self._write(change)

    def leave_unused(self, keys: Iterable[SampleKey], reason: str) -> None:
        """The run is over, and no update will consume these samples, which are open."""
        self._move(keys, State.UNUSED, OPEN, reason=reason)

    def save(self, copy: Path) -> Future[None]:
        """Write a copy for the checkpoint of the present step, in which everything consumed is committed. It is as of
        the call; changes made before the returned future is done are not in it."""
        self._raise_failure()
        if self._thread is not None:
            self._changes.append(None)
            self._job_queued = False  # a job queued earlier stops at the mark
            return self._thread.submit(self._copy_at_mark, copy)
        self._copy(copy)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def mark_committed(self, step: int | None = None) -> None:
        """A checkpoint is complete: mark everything consumed by updates up to `step` (all if None) as committed, and
        archive what is settled."""
        self._write(self._owned(lambda db: self._settle(db, step)))

    def _settle(self, db: sqlite3.Connection, step: int | None = None) -> None:
        _commit_consumed(db, step)
        archive_settled(db, self._places)

    async def settled(self) -> None:
        """Wait until every change queued so far is made."""
        if self._thread is not None and self._newest_job is not None:
            job = self._newest_job
            await self._thread.wait(job)
            if self._newest_job is job:
                self._newest_job = None
        self._raise_failure()

    def close(self) -> None:
        """Close the file, and remove its write-ahead log or journal. These stay, complete, where another program has
        the file open."""
        if self._thread is not None and not self._thread.inside:
            self._thread.do(self.close)
            return
        self._make_changes()
        with self._converted_errors("closed"), closing(self._db):
            self._check_term()
            self._db.execute("PRAGMA busy_timeout=2000")
            try:
                self._db.execute("PRAGMA journal_mode=DELETE")
            except sqlite3.OperationalError as error:
                if not _is_locked(error):
                    raise

    def _copy(self, copy: Path) -> None:
        self._check_term()
        with self._converted_errors("copied"), flushing(copy), closing(sqlite3.connect(copy)) as target:
            self._db.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")
            with target:
                self._settle(target)

    def _copy_at_mark(self, copy: Path) -> None:
        """Copy the ledger as of the changes queued before its mark."""
        self._make_changes()
        self._changes.popleft()
        self._copy(copy)
        self._make_changes()

    def _move(self, keys: Iterable[SampleKey], to: State, since: tuple[State, ...], **columns: Any) -> None:
        """Move samples from one of the states `since` to another, and set some columns."""
        self._write(self._moving(keys, to, since, **columns))

    def _moving(self, keys: Iterable[SampleKey], to: State, since: tuple[State, ...], **columns: Any) -> Change:
        rows = [(*columns.values(), to, *key.numbers, *since) for key in keys]
        named, marks = "".join(f"{name} = ?, " for name in columns), ", ".join("?" * len(since))

        def change(db: sqlite3.Connection) -> None:
            changed = db.executemany(f"UPDATE samples SET {named}state = ? WHERE epoch = ? AND row = ? AND "
                                     f"sample = ? AND state IN ({marks})", rows)
            self._require(changed.rowcount, len(rows), to, since)

        return change

    def _write(self, change: Callable[[sqlite3.Connection], Any]) -> None:
        """Make a change, or queue it for the thread."""
        self._raise_failure()
        if self._thread is None or self._thread.inside:
            self._make_changes()
            self._apply([change])
            return
        self._changes.append(change)
        if not self._job_queued:
            self._job_queued = True
            self._newest_job = self._thread.submit(self._make_changes)

    def _make_changes(self) -> None:
        """Make the queued changes, up to the mark of a copy."""
        self._job_queued = False  # first: a change queued from here on queues another job, or is seen by this one
        changes = []
        while self._changes and (change := self._changes[0]) is not None:
            changes.append(change)
            self._changes.popleft()
        self._raise_failure()
        try:
            self._apply(changes)
        except BaseException as error:
            self._failure = error
            raise

    def _apply(self, changes: list[Change]) -> None:
        """Make changes in one transaction; if one of them fails, those before it are made."""
        if not changes:
            return
        with self._converted_errors("written"), flushing(self.path):
            try:
                with self._db as db:
                    for change in changes:
                        change(db)
            except (sqlite3.Error, LedgerError):
                if len(changes) == 1:
                    raise
                for change in changes:
                    with self._db as db:
                        change(db)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _require(self, found: int, wanted: int, what: str, since: tuple[State, ...]) -> None:
        if found != wanted:
            raise LedgerError(f"{wanted} samples should become {what}, and {found} of them are {' or '.join(since)} in "
                              f"{self.path}: a sample came twice, or was never admitted. This is a bug; report it")

    def _owned(self, change: Change) -> Change:
        """A change that is made only while this driver owns the directory."""
        def checked(db: sqlite3.Connection) -> None:
            self._check_term()
            change(db)

        return checked

    def _check_term(self) -> None:
        if self._term is not None:
            self._term.check()

    @contextmanager
    def _converted_errors(self, action: str) -> Iterator[None]:
        """Raise SQLite's errors as LedgerError."""
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"{self.path}: a sample was admitted twice ({error}). This is a bug; report "
                              "it") from error
        except sqlite3.Error as error:
            self._check_term()  # SQLite refuses to begin a journal for a file that has been replaced
            hint = "another program has locked it: end that program" if _is_locked(error) else "check its disk's space"
            raise LedgerError(f"{self.path} cannot be {action}: {error}; {hint}") from error


def discard(path: Path) -> None:
    """Remove a ledger with its log and journal."""
    for side in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + side).unlink(missing_ok=True)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection to a ledger that a run may be writing. If it has a write-ahead log on a shared file system
    (the directory was copied there), the connection is to a copy in memory.

    Raises:
        LedgerError: the file is missing, damaged or of another version.
    """
    if not path.is_file():
        raise LedgerError(f"no such ledger: {path}. A PPO run writes one once its workers are ready; give the "
                          "directory of such a run")
    db = sqlite3.connect(_uri(path, "ro"), uri=True)
    try:
        if _has_log(path) and not is_local(path):
            db.close()
            db = _copy_in_memory(path)
        check_ledger(db, path)
    except BaseException:
        db.close()
        raise
    return db


def is_local(path: Path) -> bool:
    """Whether a file is on a file system of this machine alone; False where that is unknown."""
    return file_system_of(path) in LOCAL_FILE_SYSTEMS


def file_system_of(path: Path) -> str | None:
    """The type of file system that a file is on, or will be; None where the system does not report it."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    place, best, kind = path.absolute().resolve(), Path(), None
    for line in lines:  # a later mount hides earlier ones at its place
        before, _, after = line.partition(" - ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        if place.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, after.split()[0]
    return kind


def _has_log(path: Path) -> bool:
    """Whether a database has a write-ahead log, by its header (byte 18 is 2)."""
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _copy_in_memory(path: Path) -> sqlite3.Connection:
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-ledger-") as here:
        for side in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(path.with_name(path.name + side), Path(here, f"ledger{side}"))
        db = sqlite3.connect(":memory:")
        try:
            with reading_errors(db), closing(sqlite3.connect(Path(here, "ledger"))) as source:
                source.backup(db)
        except BaseException:
            db.close()
            raise
    db.execute("PRAGMA query_only=1")
    return db


def check_ledger(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a damaged file, one of another schema, and one with other tables or with triggers.

    Raises:
        LedgerError: the file is one of these.
    """
    with reading_errors(db):
        _check_ledger(db, path)


def _check_ledger(db: sqlite3.Connection, path: Path) -> None:
    if (result := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise LedgerError(f"{path} is damaged: {result}; resume from a checkpoint, which has its own copy")
    schema = db.execute("SELECT value FROM facts WHERE name = 'schema'").fetchone()
    if schema is None or schema[0] != SCHEMA:
        raise LedgerError(f"{path} has schema {schema and schema[0]}, this version reads {SCHEMA}: read it with the "
                          "version of rlhf-ray that wrote it, or start a new run")
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(CREATE)
        if contents(db) != contents(empty):
            raise LedgerError(f"{path} is damaged or not a ledger: its tables differ from those of schema {SCHEMA}")


def _is_locked(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY")


def _commit_consumed(db: sqlite3.Connection, step: int | None = None) -> None:
    db.execute("UPDATE samples SET state = ?1 WHERE state = ?2 AND (step <= ?3 OR ?3 IS NULL)",
               (State.COMMITTED, State.CONSUMED, step))


def _attempts_beyond(path: Path, copy: Path) -> list[tuple[Any, ...]]:
    """Attempts given up according to the ledger at `path`, with those at samples that the checkpoint's copy does not
    have; none if that ledger is missing or damaged, since the copy is what counts."""
    try:
        with closing(open_for_reading(path)) as db:
            db.execute("ATTACH DATABASE ? AS saved", (_uri(copy, "ro"),))
            return db.execute(
                "SELECT * FROM attempts UNION SELECT epoch, row, sample, attempt, state, worker, ? FROM samples AS now "
                "WHERE state != 'admitted' AND NOT EXISTS (SELECT 1 FROM saved.samples AS before WHERE (before.epoch, "
                "before.row, before.sample) = (now.epoch, now.row, now.sample))", (LOST,)).fetchall()
    except (LedgerError, sqlite3.Error):
        return []


def _uri(path: Path, mode: str) -> str:
    return f"{path.absolute().as_uri()}?mode={mode}"
