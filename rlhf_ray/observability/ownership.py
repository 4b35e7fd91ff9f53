"""How a driver claims a run's directory (see `owner_record`), renews its record in a thread, and notices a takeover."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_ray.errors import ConfigError, SupersededError
from rlhf_ray.files.fsync import fsync_descriptor, moved
from rlhf_ray.observability.owner_record import (
    FOLDER,
    GONE,
    ProcessIdentity,
    Record,
    Term,
    day_and_time,
    newest_record,
    term_numbers,
)

BEAT_S = 5.0
"""Interval between renewals of a record."""
SILENT_S = 60.0
"""A record of another machine that is unchanged for this long is taken over."""
LOOK_S = 1.0
"""Interval between looks at it."""
LEAVING_S = 10.0
"""Longest wait for the record to be closed at the end, in case the disk hangs."""


def claim(
    directory: Path, process: ProcessIdentity, say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> Term:
    """Take a directory for the next term. Of several simultaneous claims, one succeeds.

    Args:
        process: the claimant.
        say: called with a message about the wait.
        clock, sleep: of who takes it, in seconds.

    Raises:
        ConfigError: the directory has a live owner.
    """
    folder = directory.absolute() / FOLDER
    folder.mkdir(exist_ok=True)
    while True:
        found = newest_record(folder)
        if found and not _is_over(directory, folder, found, process, say, clock, sleep):
            continue
        last = Record.read(found[1]) if found else None
        term = Term(folder.parent, found[0] + 1 if found else 1)
        before = None if last is None else last.chosen
        if _create(term, Record(term.number, process, time.time(), time.time(), before=before)):
            for number in term_numbers(folder):
                if number < term.number:
                    (folder / f"term_{number}.json").unlink(missing_ok=True)
            return term


def _create(term: Term, record: Record) -> bool:
    """Create the record; False when another driver has created it."""
    try:
        handle = os.open(term.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(handle, record.encoded())
        fsync_descriptor(handle, term.path)
    except BaseException:
        term.path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    if max(term_numbers(term.path.parent), default=0) > term.number:  # this term came and went since we looked
        term.path.unlink(missing_ok=True)
        return False
    return True


def _is_over(
    directory: Path, folder: Path, found: tuple[int, bytes], process: ProcessIdentity, say: Callable[[str], None],
    clock: Callable[[], float], sleep: Callable[[float], None],
) -> bool:
    """Whether the driver of the newest record is gone; False when the record changed, and has to be judged again.

    Raises:
        ConfigError: it lives.
    """
    record = Record.read(found[1])
    if record and record.ended:
        return True
    lives = record.process.lives(process) if record else None
    if record and lives:
        raise _owned(directory, record)
    if lives is False:
        return True
    who = "being claimed by another driver"
    if record:
        who = f"owned by {record.process}, seen last at {day_and_time(record.renewed)} by its clock"
    until, announced = clock() + SILENT_S, False
    while (asked := clock()) < until:
        sleep(LOOK_S)
        moved()  # this wait has its own deadline
        now = newest_record(folder)
        renewed = Record.read(now[1]) if now else None
        if now is None or now[0] != found[0] or record is None or (renewed and renewed.ended):
            if now != found:
                return False
        elif now != found:
            raise _owned(directory, renewed or record)
        if not announced:  # a simultaneous claim has ended by now
            say(f"run.dir={str(directory)!r} is {who}; waiting up to {SILENT_S:g} s to see whether it is alive")
            announced = True
        if clock() - asked > LOOK_S + BEAT_S:  # the disk, or this process, stood still: the owner may have, too
            until = clock() + SILENT_S
    return True


def _owned(directory: Path, record: Record) -> ConfigError:
    return ConfigError(f"run.dir={str(directory)!r} is being written by another run, {record.process}, since "
                       f"{day_and_time(record.since)}: wait for its end or stop it, or choose another run.dir. If this "
                       f"directory is a copy of that run's, remove {str(directory / FOLDER)!r} from it")


class Ownership:
    """One driver's term over a run's directory, from the claim to the end."""

    def __init__(self, term: Term, warn: Callable[[str], None] | None = None) -> None:
        """`warn` receives a message when the record cannot be renewed; by default it is logged."""
        record = term.record()
        if record is None:
            raise term.superseded()
        self.term, self._record, self._warn = term, record, warn or logging.getLogger(__name__).warning
        self.lost: SupersededError | None = None
        """The error that ends the driver, once another one has taken over."""
        self._on_lost: Callable[[], None] = lambda: None
        self._lock, self._over, self._failing = threading.Lock(), threading.Event(), False

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Set the callback of a takeover; it runs in the renewing thread, or at once if the term is already lost."""
        self._on_lost = callback
        if self.lost:
            callback()

    def go_on_from(self, step: int | None) -> None:
        """Record the checkpoint that the run continues from (None: it starts over): later checkpoints of other terms do
        not belong to it.

        Raises:
            SupersededError: the term is lost.
        """
        self.term.check()
        with self._lock:
            self._write(went_on_from=-1 if step is None else step, flush=True)

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the record during the enclosed work, and mark it as ended afterwards."""
        thread = threading.Thread(target=self._keep_renewing, daemon=True, name="owner record")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(LEAVING_S)

    def renew(self, ended: bool = False) -> None:
        """Increase the record's counter, or mark it as ended. A failure to write is reported once, and the next call
        tries again."""
        try:
            self.term.check()
            with self._lock:
                self._write(beat=self._record.beat + 1, ended=ended)
            self._failing = False
        except SupersededError as error:
            self._lose(error)
        except OSError as error:
            if error.errno in GONE:  # removed since the check
                self._lose(self.term.superseded())
            elif not self._failing:
                self._failing = True
                self._warn(f"{self.term.path} cannot be renewed ({error.strerror or error}); the run continues, but a "
                           f"driver on another machine may take it over when this lasts for {SILENT_S:g} s")

    def _keep_renewing(self) -> None:
        while not self._over.wait(BEAT_S) and self.lost is None:
            try:
                self.renew()
            except Exception as bug:  # the next renewal must still happen
                self._warn(f"{self.term.path} was not renewed: {type(bug).__name__}: {bug}")
        if self.lost is None:
            self.renew(ended=True)

    def _lose(self, error: SupersededError) -> None:
        if self.lost is None:
            self.lost = error
            self._on_lost()

    def _write(self, flush: bool = False, **changes: Any) -> None:
        """Overwrite the record in place; it is not created again where a successor has removed it."""
        record: Record = replace(self._record, renewed=time.time(), **changes)
        handle = os.open(self.term.path, os.O_WRONLY)
        try:
            os.pwrite(handle, record.encoded(), 0)
            if flush:
                fsync_descriptor(handle, self.term.path)
        finally:
            os.close(handle)
        self._record = record
