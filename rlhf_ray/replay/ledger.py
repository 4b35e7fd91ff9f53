"""The ledger: what became of every sample that a run ever admitted, in one SQLite file.

A sample is known by its key (epoch, row, sample) for ever, from the moment when the data cursor hands its prompt out;
attempts to make it are numbered apart. Its life:

    admitted ──► leased ──► generated ──► scored ──► consumed(step) ──► committed    the step is in a checkpoint
       ▲           │            │           │ └────► not_applied(step, reason)       the step changed no weight
       └───────────┴────────────┴───────────┤   the attempt is given up, and another follows
                                            ├──► quarantined(reason)                 there will be no other
                                            └──► unused(reason)                      the run ended before its turn

How far the cursor has come is written together with what it handed out, so that at any moment each sample it handed out
has one place here, and nothing else has.

The running process keeps `ledger.sqlite` up to date, so that others can read it meanwhile: with a write-ahead log on a
file system of one machine, with a rollback journal on one that others may share. A checkpoint holds a copy made for it,
in which everything consumed is committed: manifest, weights, data cursor and ledger become valid by one rename. A
resumed run goes on from that copy; what the process had done since is remembered as lost attempts.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from rlhf_ray.errors import LedgerError
from rlhf_ray.files.durable import flushing
from rlhf_ray.files.thread import FileThread
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.file_system import is_local
from rlhf_ray.replay.ledger_tables import CREATE, OPEN, SCHEMA, UNDER_WAY, LedgerFacts, State, contents, unharmed

LOCKED_S = 60.0
"""For another program to let go of the file. Those that read it as `open_for_reading` does never keep it."""
LOST = "the process ended before the next checkpoint"
UNMADE = "FROM samples WHERE state IN ('leased', 'generated')"
"""Samples whose experience is not whole; a checkpoint holds the bytes of those that are scored."""


Change = Callable[[sqlite3.Connection], Any]


class Ledger:
    """A run's ledger, open for writing; for the coordinator's one thread.

    With a file thread, methods that write note what is to be changed and return at once; that thread makes the changes
    in the same order, as many in one transaction as wait, and `settled` says that all of them are on disk. Without one,
    each is a transaction of its own and is made when the method returns. Either way a process killed at any moment
    leaves a file that can be read.

    Raises:
        LedgerError: (any method that writes, and `settled`) the file cannot be read or written, or a sample is not in
            the state it must be in; nothing that was noted later is written then.
        SupersededError: (the same, after a method about an update or a checkpoint) another driver owns the run's
            directory now. It has put a new file in the place of this one, which a late write does not reach.
    """

    def __init__(self, path: Path, term: Term | None = None, thread: FileThread | None = None) -> None:
        """Open an existing ledger; see `create`. `term`: of the owner of the run's directory, which is noted in it."""
        self.path, self._term, self._thread = Path(path), term, thread
        self._changes: deque[Change | None] = deque()
        """That wait for the thread. None: a copy is to be made of what is before it."""
        self._asked: Future[None] | None = None
        """The newest job that makes changes."""
        self._coming = False
        """Whether a job is on its way that will see every change noted by now."""
        self._failure: BaseException | None = None
        with self._told("opened"):
            # Whoever calls, one thread at a time does: the file thread, where there is one, once the run goes on.
            self._db = sqlite3.connect(_uri(self.path, "rw"), uri=True, timeout=LOCKED_S, check_same_thread=False)
            if is_local(self.path):
                self._db.execute("PRAGMA journal_mode=WAL")
            else:
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # so that a log left behind needs no shared memory
                self._db.execute("PRAGMA journal_mode=TRUNCATE")
                self._db.execute("PRAGMA locking_mode=NORMAL")
            self._db.execute("PRAGMA synchronous=NORMAL")  # survives the process; a checkpoint's copy is flushed
            check_ledger(self._db, self.path)
        if term is not None:
            self._apply([lambda db: db.execute("INSERT OR REPLACE INTO facts VALUES ('term', ?)", (term.number,))])

    @classmethod
    def create(cls, path: Path, facts: LedgerFacts, term: Term | None = None, thread: FileThread | None = None) -> Self:
        """An empty ledger at `path`, which must be free."""
        if path.exists():
            raise LedgerError(f"{path} exists already; a ledger is not begun twice")
        try:
            with closing(sqlite3.connect(path)) as db:
                db.executescript(CREATE)
                db.executemany("INSERT INTO facts VALUES (?, ?)", [("schema", SCHEMA), *facts.rows()])
                db.executemany("INSERT INTO cursor VALUES (?, 0)", [(n,) for n in range(len(facts.source_rows))])
                db.commit()
        except sqlite3.Error as error:
            raise LedgerError(f"{path} cannot be made: {error}") from error
        return cls(path, term, thread)

    @classmethod
    def resume(cls, path: Path, copy: Path, facts: LedgerFacts, term: Term | None = None,
               thread: FileThread | None = None) -> Self:
        """Go on from a checkpoint's copy; what was under way then or came after is remembered as lost attempts.

        Raises:
            LedgerError: the copy is of a run with other facts, or unreadable.
        """
        lost = _attempts_beyond(path, copy)
        discard(path)
        with closing(open_for_reading(copy)) as source, closing(sqlite3.connect(path)) as target:
            source.backup(target)
        ledger = cls(path, term, thread)
        found = LedgerFacts.read(ledger._db)
        loosest = replace(facts, max_staleness=max(facts.max_staleness, found.max_staleness))
        if replace(found, max_staleness=loosest.max_staleness) != loosest:
            raise LedgerError(f"{copy} is the ledger of a run with {found}, and this one has {facts}; resume with the "
                              "same settings, or begin a new run")

        def take_up(db: sqlite3.Connection) -> None:
            db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", loosest.rows())
            db.execute(f"INSERT OR REPLACE INTO attempts SELECT epoch, row, sample, attempt, state, worker, ? {UNMADE}",
                       (LOST,))
            db.execute("UPDATE samples SET state = ?, version = NULL, worker = NULL WHERE rowid IN (SELECT rowid "
                       f"{UNMADE})", (State.ADMITTED,))
            db.executemany("INSERT OR IGNORE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", lost)
            db.execute("UPDATE samples SET attempt = 1 + (SELECT count(*) FROM attempts AS a WHERE (a.epoch, a.row, "
                       "a.sample) = (samples.epoch, samples.row, samples.sample)) WHERE state IN (?, ?)",
                       (State.SCORED, State.ADMITTED))

        ledger._apply([take_up])
        return ledger

    def admit(self, keys: Iterable[SampleKey], position: Sequence[int]) -> None:
        """The data cursor has handed out the prompts of these samples, and stands at `position` now: prompts handed out
        of each source, over all its epochs."""
        rows = [(*key.numbers, State.ADMITTED) for key in keys]
        counts = [(count, source) for source, count in enumerate(position)]

        def change(db: sqlite3.Connection) -> None:
            db.executemany(
                "INSERT INTO samples (epoch, row, sample, attempt, state) VALUES (?1, ?2, ?3, 1 + (SELECT "
                "count(*) FROM attempts WHERE epoch = ?1 AND row = ?2 AND sample = ?3), ?4)", rows)
            db.executemany("UPDATE cursor SET handed_out = ? WHERE source = ?", counts)

        self._write(change)

    def lease(self, keys: Iterable[SampleKey], version: int) -> None:
        """An attempt at admitted samples begins, under weights of `version`."""
        self._move(keys, State.LEASED, (State.ADMITTED,), version=version)

    def generated(self, keys: Iterable[SampleKey], worker: str) -> None:
        """`worker` has drawn the responses."""
        self._move(keys, State.GENERATED, (State.LEASED,), worker=worker)

    def scored(self, keys: Iterable[SampleKey], min_version: int) -> None:
        """The samples' experience is whole; `min_version` is the oldest version among its tokens."""
        self._move(keys, State.SCORED, (State.GENERATED,), version=min_version)

    def consumed(self, keys: Iterable[SampleKey], step: int) -> None:
        """Update number `step` (from 1) was made with the samples."""
        self._write(self._owned(self._moving(keys, State.CONSUMED, (State.SCORED,), step=step)))

    def not_applied(self, keys: Iterable[SampleKey], step: int, reason: str) -> None:
        """Update number `step` was made with the samples and changed nothing: they were not trained on."""
        self._write(self._owned(self._moving(keys, State.NOT_APPLIED, (State.SCORED,), step=step, reason=reason)))

    def quarantine(self, keys: Iterable[SampleKey], reason: str) -> None:
        """The samples are set aside for good."""
        self._move(keys, State.QUARANTINED, UNDER_WAY, reason=reason)

    def quarantined(self) -> list[tuple[SampleKey, str]]:
        """Samples that were set aside, and why."""
        found = self._db.execute("SELECT epoch, row, sample, reason FROM samples WHERE state = ? ORDER BY 1, 2, 3",
                                 (State.QUARANTINED,))
        return [(SampleKey(*key), reason) for *key, reason in found]

    def open_keys(self) -> set[SampleKey]:
        """The samples that an update is to be made with yet."""
        marks = ", ".join("?" * len(OPEN))
        found = self._db.execute(f"SELECT epoch, row, sample FROM samples WHERE state IN ({marks})", OPEN)
        return {SampleKey(*key) for key in found}

    def position(self) -> list[int]:
        """How far the data cursor has come: prompts handed out of each source."""
        return [count for (count,) in self._db.execute("SELECT handed_out FROM cursor ORDER BY source")]

    def give_up(self, keys: Iterable[SampleKey], reason: str) -> None:
        """The present attempt at these samples is over without success, and another is to follow."""
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
        """The run is over, and no update will be made with these samples, which wait or are under way."""
        self._move(keys, State.UNUSED, OPEN, reason=reason)

    def save(self, copy: Path) -> Future[None]:
        """Write a copy for the checkpoint of the present step: everything consumed is committed in it. It is of the
        moment of the call, whatever is noted until the returned future is done."""
        self._raise_failure()
        if self._thread is not None:
            self._changes.append(None)
            self._coming = False  # a job that was asked for before stops at the mark
            return self._thread.submit(self._copy_at_mark, copy)
        self._copy(copy)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def commit(self, step: int | None = None) -> None:
        """The checkpoint is in its place: everything consumed by updates up to `step` (all if None) is committed."""
        self._write(self._owned(lambda db: _commit_consumed(db, step)))

    async def settled(self) -> None:
        """Every change noted so far is made."""
        if self._thread is not None and self._asked is not None:
            asked = self._asked
            await self._thread.wait(asked)
            if self._asked is asked:
                self._asked = None
        self._raise_failure()

    def close(self) -> None:
        """Leave one file behind, without a write-ahead log, which readers would begin anew, and without a journal. They
        stay, whole, where somebody reads at this moment, or holds the file."""
        if self._thread is not None and not self._thread.inside:
            self._thread.do(self.close)
            return
        self._make_changes()
        with self._told("closed"), closing(self._db):
            self._check_term()
            self._db.execute("PRAGMA busy_timeout=2000")
            try:
                self._db.execute("PRAGMA journal_mode=DELETE")
            except sqlite3.OperationalError as error:
                if not _is_locked(error):
                    raise

    def _copy(self, copy: Path) -> None:
        self._check_term()
        with self._told("copied"), flushing(copy), closing(sqlite3.connect(copy)) as target:
            self._db.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")
            with target:
                _commit_consumed(target)

    def _copy_at_mark(self, copy: Path) -> None:
        """A copy of what was noted before its mark."""
        self._make_changes()
        self._changes.popleft()
        self._copy(copy)
        self._make_changes()

    def _move(self, keys: Iterable[SampleKey], to: State, since: tuple[State, ...], **columns: Any) -> None:
        """Bring samples from one of the states `since` to the next, and set some columns."""
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
        """Make a change, or have it made."""
        self._raise_failure()
        if self._thread is None or self._thread.inside:
            self._make_changes()
            self._apply([change])
            return
        self._changes.append(change)
        if not self._coming:
            self._coming = True
            self._asked = self._thread.submit(self._make_changes)

    def _make_changes(self) -> None:
        """Make the changes that were noted, up to the mark of a copy."""
        self._coming = False  # first: what is noted from here on asks for another job, or is seen by this one
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
        """Make changes in one transaction; where one of them cannot be made, those before it are."""
        if not changes:
            return
        with self._told("written"), flushing(self.path):
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
            raise LedgerError(f"{wanted} samples were to be {what}, and {found} of them are {' or '.join(since)} in "
                              f"{self.path}: a sample came twice, or was never admitted")

    def _owned(self, change: Change) -> Change:
        """A change that is made in this driver's term only."""
        def checked(db: sqlite3.Connection) -> None:
            self._check_term()
            change(db)

        return checked

    def _check_term(self) -> None:
        if self._term is not None:
            self._term.check()

    @contextmanager
    def _told(self, action: str) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"{self.path}: a sample that is there already was admitted again ({error})") from error
        except sqlite3.Error as error:
            self._check_term()  # SQLite refuses to begin a journal for a file that has been replaced
            hint = "another program keeps it locked: end that" if _is_locked(error) else "is the disk full?"
            raise LedgerError(f"{self.path} cannot be {action}: {error}; {hint}") from error


def discard(path: Path) -> None:
    """Remove a ledger and what SQLite keeps beside it."""
    for side in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + side).unlink(missing_ok=True)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, to a ledger that a run may be writing. Where a write-ahead log lies on a file
    system that has none (the directory was copied there), it is one to a copy in memory.

    Raises:
        LedgerError: there is none, or it is damaged or another version's.
    """
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}: only a PPO run keeps one, once its workers are ready")
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


def _has_log(path: Path) -> bool:
    """Whether a database says of itself that it has a write-ahead log (byte 18 of its header is 2)."""
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _copy_in_memory(path: Path) -> sqlite3.Connection:
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-ledger-") as here:
        for side in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(path.with_name(path.name + side), Path(here, f"ledger{side}"))
        db = sqlite3.connect(":memory:")
        try:
            with unharmed(db), closing(sqlite3.connect(Path(here, "ledger"))) as source:
                source.backup(db)
        except BaseException:
            db.close()
            raise
    db.execute("PRAGMA query_only=1")
    return db


def check_ledger(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a damaged file, one of another schema, and one with other tables, or triggers, whoever put them there.

    Raises:
        LedgerError: says which.
    """
    with unharmed(db):
        _check_ledger(db, path)


def _check_ledger(db: sqlite3.Connection, path: Path) -> None:
    if (said := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise LedgerError(f"{path} is damaged: {said}")
    schema = db.execute("SELECT value FROM facts WHERE name = 'schema'").fetchone()
    if schema is None or schema[0] != SCHEMA:
        raise LedgerError(f"{path} has schema {schema and schema[0]}, this version reads {SCHEMA}: read it with the "
                          "version of rlhf-ray that wrote it, or begin a new run")
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(CREATE)
        if contents(db) != contents(empty):
            raise LedgerError(f"{path} is damaged, or no ledger: it has other tables or columns than one has")


def _is_locked(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY")


def _commit_consumed(db: sqlite3.Connection, step: int | None = None) -> None:
    db.execute("UPDATE samples SET state = ?1 WHERE state = ?2 AND (step <= ?3 OR ?3 IS NULL)",
               (State.COMMITTED, State.CONSUMED, step))


def _attempts_beyond(path: Path, copy: Path) -> list[tuple[Any, ...]]:
    """Attempts that came to nothing by the ledger at `path`, with those of samples that the checkpoint's copy has never
    met; none where there is no such ledger, or it is damaged: the copy holds what counts."""
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
