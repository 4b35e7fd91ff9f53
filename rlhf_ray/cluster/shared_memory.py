"""Shared memory that killed processes leave behind: files in /dev/shm, which stay until somebody removes them.

vLLM's and NCCL's processes talk through such files, and remove them when they end in good order. People keep files of
their own there as well, for speed: models, caches of data sets. Nothing of theirs is removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PLACE = "/dev/shm/"
CLOCKS_S = 1.0
"""By which the kernel's times of processes and of files may differ."""


def made_by(pids: Iterable[int], since: float) -> set[str]:
    """Paths of the segments that processes of this host use and may have made: what lies in /dev/shm itself, as shared
    memory does, and was not there before the first of the processes began.

    Args:
        since: when that was, in seconds since 1970.
    """
    return {path for path in mapped_by(pids) if _is_new(path, since)}


@contextmanager
def removed_after(members: Iterable[tuple[int, float]]) -> Iterator[None]:
    """Have the enclosed work end processes, and remove what they and all that they have started made then (`made_by`),
    if nobody uses it any more.

    Args:
        members: (pid, when it began) of each.
    """
    named = tuple(members)
    pids = [pid for pid, _ in named]
    segments = made_by({*pids, *_started_by(pids)}, min((began for _, began in named), default=0.0))
    try:
        yield
    finally:
        remove_unused(segments)


def _started_by(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            yield from (child.pid for child in psutil.Process(pid).children(recursive=True))


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Paths of the segments in /dev/shm itself that processes of this host use. Of others' processes nothing is
    known."""
    inodes = {inode for pid in pids for inode in _mapped(pid)}
    with suppress(OSError):
        return {entry.path for entry in os.scandir(PLACE) if entry.inode() in inodes}
    return set()


def remove_unused(paths: Iterable[str]) -> None:
    """Remove those segments that no process uses any more."""
    if found := set(paths):
        for path in found - mapped_by(psutil.pids()):
            with suppress(OSError):  # somebody else was faster, or it is somebody else's
                Path(path).unlink()


def _is_new(path: str, since: float) -> bool:
    with suppress(OSError):  # it is gone, or somebody else's
        return Path(path).stat().st_ctime > since - CLOCKS_S
    return False


def _mapped(pid: int) -> set[int]:
    """Inodes in /dev/shm that a process maps. Names would not do: a semaphore has another one by the time it is used
    (sem_open(3) makes a file, links it to its name, and removes the first)."""
    with suppress(OSError):  # it is gone, or another user's
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {int(line.split()[4]) for line in lines if PLACE in line}
    return set()
