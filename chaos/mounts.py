"""File systems that only the runs of this process use: a private /dev/shm, and a small disk that can be filled."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNS = 0x00020000
"""unshare(2): a new mount namespace."""
SHARED_MEMORY_MOUNTS = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])
DISK_MB = 512
BALLAST = "ballast"
LEFT_BYTES = 300 * 1024
"""Free bytes on a filled disk: enough for metrics, too few for a checkpoint of the tiny models."""


def mount_private_shared_memory() -> bool:
    """Mount another /dev/shm for this process and its children, so that only their segments are in it. Other processes
    do not see it, and it ends with them.

    Returns:
        Whether that was possible: it requires root. Otherwise /dev/shm may contain segments of other programs.
    """
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    return all(subprocess.run(command, capture_output=True).returncode == 0 for command in SHARED_MEMORY_MOUNTS)


@contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """Mount a small tmpfs at `directory` within the block; yields whether that was possible (it requires root)."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(directory)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill_disk(directory: Path) -> int:
    """Fill the disk of a directory except for LEFT_BYTES; returns the number of bytes written."""
    stats = os.statvfs(directory)
    size = max(0, stats.f_bavail * stats.f_frsize - LEFT_BYTES)
    with (directory / BALLAST).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return size


def free_disk(directory: Path) -> None:
    """Undo `fill_disk`; does nothing where the disk was not filled."""
    (directory / BALLAST).unlink(missing_ok=True)
