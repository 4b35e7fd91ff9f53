"""Removes shared memory that killed processes leave behind: files in /dev/shm, which otherwise stay.

vLLM's and NCCL's processes communicate through such files, and remove them at a normal end. People keep files of their
own there too, for speed (models, caches of data sets); these are never removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SHM = "/dev/shm/"
CLOCKS_S = 1.0
"""Largest difference between the kernel's clocks of processes and of files."""


def made_by(pids: Iterable[int], since: float) -> set[str]:
    """Paths of the segments that processes of this host use and may have made: files in /dev/shm itself, as shared
    memory is, that did not exist before the first of the processes started.

    Args:
        since: start of the first process, in seconds since 1970.
    """
    return {path for path in mapped_by(pids) if _is_new(path, since)}


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Paths of the segments in /dev/shm itself that processes of this host map. Other users' processes cannot be
    read."""
    inodes = {inode for pid in pids for inode in _mapped(pid)}
    with suppress(OSError):
        return {entry.path for entry in os.scandir(SHM) if entry.inode() in inodes}
    return set()


def remove_unused(paths: Iterable[str]) -> None:
    """Remove the segments that no process maps any more."""
    if segments := set(paths):
        for path in segments - mapped_by(psutil.pids()):
            with suppress(OSError):  # already removed, or owned by another user
                Path(path).unlink()


def _is_new(path: str, since: float) -> bool:
    with suppress(OSError):  # it is gone, or owned by another user
        return Path(path).stat().st_ctime > since - CLOCKS_S
    return False


def _mapped(pid: int) -> set[int]:
    """Inodes in /dev/shm that a process maps. Names are not enough: a semaphore is renamed before it is used
    (sem_open(3) makes a file, links it to its name, and removes the first)."""
    with suppress(OSError):  # it is gone, or owned by another user
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {int(line.split()[4]) for line in lines if SHM in line}
    return set()
