"""Flushing to disk, with progress that other threads can watch.

Every writer of the package calls these functions, so that a failpoint can stop each of them, and a deadline can name
the operation and the file that hang.
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
"""Bytes of a large file that are flushed at a time; each piece counts as progress."""
_WRITE_AND_WAIT = 1 | 2 | 4
"""Linux's SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER."""
_UNKNOWN = (errno.ENOSYS, errno.ESPIPE, errno.EINVAL, errno.EOPNOTSUPP)
_local = threading.local()


@dataclass
class Progress:
    """File operations of a thread, for other threads to read."""

    moved: int = 0
    """Changes with every operation that begins or ends, and with every piece of a long one."""
    doing: str = ""
    """The operation under way and its file; empty between two."""
    interrupted: bool = False
    """Whether the thread shall abandon its job at the next sign of progress."""

    def move(self) -> None:
        """Count progress.

        Raises:
            Interrupted: the job was interrupted.
        """
        self.moved += 1
        if self.interrupted:
            self.interrupted = False
            raise Interrupted


class Interrupted(Exception):
    """A long job was abandoned because its result is no longer needed."""


def progress() -> Progress:
    """Progress of the calling thread."""
    if not hasattr(_local, "progress"):
        _local.progress = Progress()
    own: Progress = _local.progress
    return own


def work_for(shared: Progress) -> None:
    """Count the calling thread's operations as progress of another thread."""
    _local.progress = shared


def moved() -> None:
    """Count a piece of a long operation as progress."""
    progress().move()


@contextmanager
def operation(what: str, path: Path | str) -> Iterator[None]:
    """Record the operation of the calling thread in the block, such as "flush" or "hash", and its file. An OSError in
    the block names the file, which one about an open file does not by itself."""
    own = progress()
    before = own.doing
    own.move()
    own.doing = f"{what} {path}"
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        own.doing, own.moved = before, own.moved + 1


@contextmanager
def flushing(path: Path | str) -> Iterator[None]:
    """`operation` around code that flushes a file itself, as SQLite does at the end of a transaction."""
    with operation("flush", path):
        reached(FSYNC, os.path.basename(path))
        yield


def fsync_descriptor(descriptor: int, path: Path | str) -> None:
    """Flush an open file to disk, a large one piece by piece. `path` is its name in `Progress`."""
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
    """Flush a range of a file, and wait for it; False if the system does not support that."""
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
