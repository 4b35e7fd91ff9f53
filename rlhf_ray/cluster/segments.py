"""Shared memory that killed processes leave behind: files in /dev/shm, which stay until somebody removes them.

vLLM's and NCCL's processes talk through such files, and remove them when they end in good order. People keep files of
their own there as well, for speed: models, caches of data sets. Nothing of theirs is removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
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
    return {path for path in mapped_by(pids) if "/" not in path.removeprefix(PLACE) and _is_new(path, since)}


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Paths of the segments that processes of this host use. Of others' processes nothing is known."""
    return {path for pid in pids for path in _mapped(pid)}


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


def _mapped(pid: int) -> set[str]:
    with suppress(OSError):  # it is gone, or another user's
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {line[line.index(PLACE):] for line in lines if PLACE in line and not line.endswith(" (deleted)")}
    return set()
