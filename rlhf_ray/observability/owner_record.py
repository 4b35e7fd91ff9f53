"""The record of who writes a run's directory: one driver at a time, on whatever machine it runs.

A driver owns a directory for a *term*. It claims the term by creating `owner/term_N.json` exclusively, which is atomic
on network file systems too (`flock` is local to the host on some); N is one more than the highest number present. It
removes earlier records, and a thread renews its own every few seconds. Whether the driver of a record is alive:

- If it ran on this machine, in this boot, its process is looked up. A dead driver is succeeded at once; a live one
  makes the claim fail.
- If it runs elsewhere, its record is watched. A renewed record makes the claim fail; a record that stays unchanged for
  a minute by the watcher's own clock is succeeded. Clocks of two machines are never compared.

A driver that was cut off may be alive and come back. So it writes under temporary names that contain its term, and
checks the term just before each rename (`Term.renaming`). A successor creates its record, removes the earlier ones,
then removes unfinished files of earlier terms, and only then reads the directory. A late rename therefore happens
before the successor reads, or finds no file to rename. A file that grows, such as metrics.jsonl, is replaced by the
successor: late bytes go to the old file. Other writes (a line of faults.jsonl or quarantine.jsonl) are checked just
before; a driver that is stopped in the microseconds in between and continues after its succession still writes that
line.

`ownership` claims and renews the record.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from rlhf_ray.errors import SupersededError

FOLDER = "owner"
GONE = (errno.ENOENT, errno.ESTALE)
"""Errors of a file that another machine has removed."""
RECORD_BYTES = 1024
"""All records have the same length, so that one write renews a record in place."""
_NAME = re.compile(r"term_(\d+)\.json")
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_DEAD = ("Z", "X")
"""States of a process that has ended and was not reaped by its parent."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, with the machine, boot and namespace in which its pid is valid."""

    host: str
    boot: str
    """Random id of the machine's boot; empty on systems without one. Containers have the id of their machine."""
    pid_namespace: int
    """Inode of the pid namespace: containers on one machine number their processes separately."""
    pid: int
    started: int
    """Clock ticks from boot to its start: a later process with the same pid has a later start."""

    @classmethod
    def own(cls) -> Self:
        """This process."""
        try:
            boot, namespace = _BOOT.read_text().strip(), os.stat(_NAMESPACE).st_ino
        except OSError:
            boot, namespace = "", 0
        return cls(socket.gethostname(), boot, namespace, os.getpid(), (_state(os.getpid()) or ("", 0))[1])

    def lives(self, seen_by: ProcessIdentity) -> bool | None:
        """Whether the process is alive, also when it is stopped; None when `seen_by`, the observer, cannot tell: from
        another machine or boot, or from another pid namespace."""
        here = (seen_by.host, seen_by.boot, seen_by.pid_namespace)
        if not self.boot or (self.host, self.boot, self.pid_namespace) != here:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process, and alive
            pass
        state = _state(self.pid)
        return state is None or (state[0] not in _DEAD and state[1] == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _state(pid: int) -> tuple[str, int] | None:
    """State and start of a process, from /proc/PID/stat; None where that is hidden or missing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may contain anything
    except OSError:
        return None
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Record:
    """Contents of a term's file."""

    term: int
    process: ProcessIdentity
    since: float
    """Start of the term, in seconds since 1970 by its host's clock; shown to users."""
    renewed: float
    """The last renewal, by the same clock; shown to users."""
    beat: int = 0
    """Number of renewals."""
    ended: bool = False
    """Whether its driver has left the directory normally."""
    went_on_from: int | None = None
    """Step of the checkpoint that the driver continued from; -1 when it started over; None until that is known."""
    before: tuple[int, int] | None = None
    """Term and `went_on_from` of the last earlier driver that had chosen; None without one."""

    def encoded(self) -> bytes:
        """The bytes of the file."""
        return json.dumps(asdict(self)).encode().ljust(RECORD_BYTES - 1) + b"\n"

    @classmethod
    def read(cls, raw: bytes) -> Self | None:
        """A file's record; None when its driver has not written it yet, or died before."""
        try:
            fields = json.loads(raw)
            before = tuple(fields.pop("before") or ()) or None
            return cls(process=ProcessIdentity(**fields.pop("process")), before=before, **fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    @property
    def chosen(self) -> tuple[int, int] | None:
        """Term and `went_on_from` of the last driver that had chosen, this one or an earlier one; None without one."""
        return self.before if self.went_on_from is None else (self.term, self.went_on_from)

    def disowns(self, term: int, step: int, cleaning: bool = False) -> bool:
        """Whether a checkpoint does not belong to the run: its driver wrote it after it had been superseded.

        Args:
            cleaning: while this driver has not chosen the checkpoint to continue from, judge by the choice of the one
                before.
        """
        number, went_on_from = self.term, self.went_on_from
        if cleaning and self.chosen:
            number, went_on_from = self.chosen
        return went_on_from is not None and term != number and step > went_on_from


@dataclass(frozen=True)
class Term:
    """The right to write into a run's directory, until another driver takes it over. Plain data: workers receive it
    with the paths that they write.

    Whatever takes a `term` writes into that directory only while the term holds, and raises SupersededError afterwards.
    It is None for a directory outside a run, and for a caller that only reads.
    """

    directory: Path
    """The run's, absolute: all nodes use this path."""
    number: int

    @property
    def path(self) -> Path:
        """Path of the record."""
        return self.directory / FOLDER / f"term_{self.number}.json"

    @property
    def mark(self) -> str:
        """The term's part of temporary names."""
        return f"t{self.number}"

    def check(self) -> None:
        """Ask the file system whether the term still holds. (Opening the record, which a successor removes, also asks
        the server of a network file system, where looking up a name may be answered from a cache.)

        Raises:
            SupersededError: it does not.
        """
        try:
            os.close(os.open(self.path, os.O_RDONLY))
            newest = max(term_numbers(self.path.parent), default=0)
        except OSError as error:
            if error.errno not in GONE:
                raise
            newest = 0
        if newest != self.number:
            raise self.superseded()

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """For a rename inside the directory: check the term before, and again if it fails, since a successor removes
        unfinished files.

        Raises:
            SupersededError: the term is over.
        """
        self.check()
        try:
            yield
        except OSError:
            self.check()
            raise

    def superseded(self) -> SupersededError:
        """The error to raise."""
        newer = read_owner(self.directory)
        if newer is None or newer.term <= self.number:
            return SupersededError(
                f"{self.path} is gone: another driver took over run.dir={str(self.directory)!r} from this one (term "
                f"{self.number}), or the file was removed. This driver ends, and writes nothing more there")
        return SupersededError(
            f"run.dir={str(self.directory)!r} was taken over by {newer.process} (term {newer.term}) while this driver "
            f"(term {self.number}) gave no sign of life there. This driver ends, and writes nothing more into it; do "
            "not start it again: the other one continues the run")

    def record(self) -> Record | None:
        """The record's present contents."""
        try:
            return Record.read(self.path.read_bytes())
        except OSError:
            return None


def renaming(term: Term | None) -> AbstractContextManager[None]:
    """`Term.renaming`; does nothing for files outside of a run."""
    return nullcontext() if term is None else term.renaming()


def read_owner(directory: Path) -> Record | None:
    """The record of the present or last owner of a run's directory; None without one."""
    try:
        newest = newest_record(directory / FOLDER)
    except OSError:
        return None
    return Record.read(newest[1]) if newest else None


def newest_record(folder: Path) -> tuple[int, bytes] | None:
    """The highest term and the bytes of its record."""
    while numbers := term_numbers(folder):
        try:
            return max(numbers), (folder / f"term_{max(numbers)}.json").read_bytes()
        except OSError as error:
            if error.errno not in GONE:  # it was succeeded just now
                raise
    return None


def term_numbers(folder: Path) -> list[int]:
    try:
        return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    except FileNotFoundError:
        return []


def day_and_time(seconds: float) -> str:
    """Seconds since 1970 as date and time, by this machine's clock and time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
