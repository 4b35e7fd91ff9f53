"""One driver writes a run's directory, on whatever machine it and others run.

A driver owns a directory for a *term*. It claims the term by creating `owner/term_N.json` exclusively, which is
atomic on network file systems too (`flock` is local to the host on some); N is one more than the highest there is. It
removes earlier records, and a thread renews its own every few seconds. Whether the driver of a record lives:

- It ran on this machine, in this boot: its process is looked up. If it is dead, it is succeeded at once; if it is
  alive, the claim is refused.
- It runs elsewhere: its record is watched. If it is renewed, the claim is refused; if it stays unchanged for a minute
  by the watcher's own clock, it is succeeded. Clocks of two machines are never compared.

A driver that was cut off may be alive and come back. So it writes under temporary names that hold its term, and
checks the term just before each rename (`Term.renaming`). A successor creates its record, removes the earlier ones,
then removes what earlier terms were writing, and only then reads the directory. A late rename therefore happens
before the successor reads, or finds nothing to rename. A file that grows, such as metrics.jsonl, is replaced by the
successor: late bytes go to the old one. Other writes (a line of faults.jsonl or quarantine.jsonl) are checked just
before; a driver that is stopped in the microseconds between and goes on after its succession still writes that line.
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
"""All records have one length, so that one is renewed in place by one write."""
_NAME = re.compile(r"term_(\d+)\.json")
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_DEAD = ("Z", "X")
"""States of a process that has ended and was not reaped by its parent."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process and the place where its number means something."""

    host: str
    boot: str
    """Random id of the boot of its machine; empty where the system has none. Containers have that of their machine."""
    pid_namespace: int
    """Inode of the namespace of its number: containers of one machine number their processes apart."""
    pid: int
    started: int
    """Clock ticks from boot to its start: another process that has its number later started later."""

    @classmethod
    def own(cls) -> Self:
        """This process."""
        try:
            boot, namespace = _BOOT.read_text().strip(), os.stat(_NAMESPACE).st_ino
        except OSError:
            boot, namespace = "", 0
        return cls(socket.gethostname(), boot, namespace, os.getpid(), (_state(os.getpid()) or ("", 0))[1])

    def lives(self, seen_by: ProcessIdentity) -> bool | None:
        """Whether the process lives, stopped ones included; None where `seen_by`, who asks, cannot tell: on another
        machine or boot, or in another namespace of process numbers."""
        here = (seen_by.host, seen_by.boot, seen_by.pid_namespace)
        if not self.boot or (self.host, self.boot, self.pid_namespace) != here:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's, and there
            pass
        state = _state(self.pid)
        return state is None or (state[0] not in _DEAD and state[1] == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _state(pid: int) -> tuple[str, int] | None:
    """State and start of a process, from /proc/PID/stat; None where that is hidden or missing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may hold anything
    except OSError:
        return None
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Record:
    """What stands in the file of a term."""

    term: int
    process: ProcessIdentity
    since: float
    """When the term began, in seconds since 1970 by its host's clock; for people."""
    renewed: float
    """When it was renewed last, by the same clock; for people."""
    beat: int = 0
    """How often it was renewed."""
    ended: bool = False
    """Whether its driver has left the directory in good order."""
    went_on_from: int | None = None
    """Step of the checkpoint that the driver went on from; -1 where it began anew; None until that is known."""
    before: tuple[int, int] | None = None
    """Term and `went_on_from` of the last driver before that had chosen; None without one."""

    def encoded(self) -> bytes:
        """The bytes of the file."""
        return json.dumps(asdict(self)).encode().ljust(RECORD_BYTES - 1) + b"\n"

    @classmethod
    def read(cls, raw: bytes) -> Self | None:
        """A file's record; None where its driver is about to write it, or died before it had."""
        try:
            found = json.loads(raw)
            before = tuple(found.pop("before") or ()) or None
            return cls(process=ProcessIdentity(**found.pop("process")), before=before, **found)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    @property
    def chosen(self) -> tuple[int, int] | None:
        """Term and `went_on_from` of the last driver that knew it, this one or one before; None without one."""
        return self.before if self.went_on_from is None else (self.term, self.went_on_from)

    def disowns(self, term: int, step: int, cleaning: bool = False) -> bool:
        """Whether a checkpoint does not belong to the run: a driver put it there after it had been superseded.

        Args:
            cleaning: while this driver has not chosen where to go on from, judge by what the one before it chose.
        """
        number, went_on_from = self.term, self.went_on_from
        if cleaning and self.chosen:
            number, went_on_from = self.chosen
        return went_on_from is not None and term != number and step > went_on_from


@dataclass(frozen=True)
class Term:
    """The right to write into a run's directory, for as long as nobody has taken it over. Plain data: workers get it
    with what they are to write."""

    directory: Path
    """The run's, absolute: all nodes know it by this name."""
    number: int

    @property
    def path(self) -> Path:
        """The record's."""
        return self.directory / FOLDER / f"term_{self.number}.json"

    @property
    def mark(self) -> str:
        """What temporary names hold."""
        return f"t{self.number}"

    def check(self) -> None:
        """Ask the file system whether the term goes on. (Opening the record, which a successor removes, asks the server
        of a network file system, too, where a look at a name may be answered from memory.)

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
        """For a rename inside the directory: checks the term before it, and again when it fails, since a successor
        removes what is to be renamed.

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
        """The error that says so."""
        newer = read_owner(self.directory)
        if newer is None or newer.term <= self.number:
            return SupersededError(
                f"{self.path} is gone: another driver took over run.dir={str(self.directory)!r} from this one (term "
                f"{self.number}), or somebody removed the file. This driver ends, and writes nothing more there")
        return SupersededError(
            f"run.dir={str(self.directory)!r} was taken over by {newer.process} (term {newer.term}) while this driver "
            f"(term {self.number}) gave no sign of life there. This driver ends, and writes nothing more into it; do "
            "not start it again, the other one goes on with the run")

    def record(self) -> Record | None:
        """What stands in the record now."""
        try:
            return Record.read(self.path.read_bytes())
        except OSError:
            return None


def renaming(term: Term | None) -> AbstractContextManager[None]:
    """`Term.renaming`; nothing for who writes where no run is."""
    return nullcontext() if term is None else term.renaming()


def read_owner(directory: Path) -> Record | None:
    """The record of who owns a run's directory, or owned it last; None where there is none."""
    try:
        found = newest_record(directory / FOLDER)
    except OSError:
        return None
    return Record.read(found[1]) if found else None


def newest_record(folder: Path) -> tuple[int, bytes] | None:
    """The highest term and the bytes of its record."""
    while numbers := term_numbers(folder):
        try:
            return max(numbers), (folder / f"term_{max(numbers)}.json").read_bytes()
        except OSError as error:
            if error.errno not in GONE:  # it was succeeded this moment
                raise
    return None


def term_numbers(folder: Path) -> list[int]:
    try:
        return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    except FileNotFoundError:
        return []


def day_and_time(seconds: float) -> str:
    """Seconds since 1970 for people, by this machine's clock and zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
