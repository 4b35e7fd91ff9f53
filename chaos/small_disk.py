"""A file system of its own for the runs, so that it can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_MB = 512
BALLAST = "ballast"
LEFT_BYTES = 300 * 1024
"""Free on a disk that was filled: enough for numbers, too little for a checkpoint of the tiny models."""


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a small tmpfs at `place` meanwhile; yields whether that was possible (it requires root)."""
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> int:
    """Fill the disk of a directory but for LEFT_BYTES; returns how many bytes that took."""
    found = os.statvfs(place)
    taken = max(0, found.f_bavail * found.f_frsize - LEFT_BYTES)
    with (place / BALLAST).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, taken)
    return taken


def free(place: Path) -> None:
    """Undo `fill`, if it was done."""
    (place / BALLAST).unlink(missing_ok=True)
