"""Flushing to disk, in one place: every writer of the package comes through here, so that a failpoint can stop each of
them, and somebody else can see which operation on which file does not come to its end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_ray.failpoints import FSYNC, reached

RANGE = 64 * 2**20
"""Bytes of a large file that are flushed at a time: each is a sign that the disk moves."""
_WRITE_AND_WAIT = 1 | 2 | 4
"""Linux's SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER."""
_UNKNOWN = (errno.ENOSYS, errno.ESPIPE, errno.EINVAL, errno.EOPNOTSUPP)
_local = threading.local()


@dataclass
class Progress:
    """What a thread does with files, for others to look at."""

    moved: int = 0
    """Changes with every operation that begins or ends, and with every piece of a long one."""
    doing: str = ""
    """The operation under way and its file; empty between two."""
    interrupted: bool = False
    """Whether the thread is to leave its job where it next could be seen to move."""

    def move(self) -> None:
        """Something came to its end.

        Raises:
            Interrupted: the job is to be left.
        """
        self.moved += 1
        if self.interrupted:
            self.interrupted = False
            raise Interrupted


class Interrupted(Exception):
    """A long job was left because nobody wants its result any more."""


def progress() -> Progress:
    """The calling thread's."""
    if not hasattr(_local, "progress"):
        _local.progress = Progress()
    own: Progress = _local.progress
    return own


def work_for(shared: Progress) -> None:
    """What the calling thread does from now on counts as another one's work."""
    _local.progress = shared


def moved() -> None:
    """A piece of a long operation is done."""
    progress().move()


@contextmanager
def operation(what: str, path: Path | str) -> Iterator[None]:
    """Name what the calling thread does meanwhile: "flush", "hash", and the file."""
    own = progress()
    before = own.doing
    own.move()
    own.doing = f"{what} {path}"
    try:
        yield
    finally:
        own.doing, own.moved = before, own.moved + 1


@contextmanager
def flushing(path: Path | str) -> Iterator[None]:
    """`operation` for what flushes a file by itself, as SQLite does at the end of a transaction."""
    with operation("flush", path):
        reached(FSYNC, os.path.basename(path))
        yield


def fsync_descriptor(descriptor: int, path: Path | str) -> None:
    """Flush an open file to disk, a large one piece by piece. `path` is its name for whoever looks on."""
    with flushing(path):
        size = os.fstat(descriptor).st_size
        for start in range(0, size, RANGE) if size > RANGE else ():
            if not _flush_range(descriptor, start):
                break
            moved()
        os.fsync(descriptor)


def fsync_path(path: Path) -> None:
    """Flush one file or directory to disk. Flushing a directory makes the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Flush all files below `directory`, then the directories, deepest first."""
    for folder, _, files in os.walk(directory, topdown=False, followlinks=False):
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                fsync_path(path)
        fsync_path(Path(folder))


def _flush_range(descriptor: int, start: int) -> bool:
    """Write a range of a file out, and wait for it; False where the system cannot do that."""
    call = _sync_file_range()
    if call is None:
        return False
    if call(descriptor, start, RANGE, _WRITE_AND_WAIT) == 0:
        return True
    if (number := ctypes.get_errno()) in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number))


@cache
def _sync_file_range() -> Any:
    """The C library's function (Linux); None elsewhere."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call
