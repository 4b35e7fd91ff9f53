"""File systems that only the runs of this process use: a private /dev/shm, and a small disk that can be filled."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNS = 0x00020000
"""unshare(2): a new mount namespace."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MOUNTS = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", str(SHARED_MEMORY)])
SMALL_SHARED_MEMORY_MB, USUAL_SHARED_MEMORY = 24, "50%"
DISK_MB = 512
OWN_DISK_MB = 256
MOUNT_S = 30.0
"""Longest time that a command about a file system may take."""
_private: list[int] = []
"""Device number of the private /dev/shm, once it is mounted."""
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
    if all(subprocess.run(command, capture_output=True).returncode == 0 for command in SHARED_MEMORY_MOUNTS):
        _private.append(os.stat(SHARED_MEMORY).st_dev)
    return bool(_private)


def probe_private_shared_memory() -> str | None:
    """Why /dev/shm is not private to this process; None if it is."""
    return None if os.stat(SHARED_MEMORY).st_dev in _private else "it could not be mounted, which requires root"


def resize_shared_memory(size: str) -> None:
    """Change the size of the private /dev/shm, such as "24m" or "50%".

    Raises:
        PermissionError: it is not private.
        subprocess.CalledProcessError: it cannot be resized.
    """
    if problem := probe_private_shared_memory():
        raise PermissionError(f"/dev/shm is not private: {problem}")
    subprocess.run(["mount", "-o", f"remount,size={size}", str(SHARED_MEMORY)], check=True, timeout=MOUNT_S)


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


@contextmanager
def own_disk(directory: Path) -> Iterator[None]:
    """Mount a small ext4 file system in a file at `directory` within the block, which can be frozen.

    Raises:
        subprocess.CalledProcessError: that is not possible: it requires root and a loop device.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix="disk-") as image:
        image.truncate(OWN_DISK_MB * 2**20)
        for command in (["mkfs.ext4", "-q", "-F", "-m", "0", image.name],
                        ["mount", "-o", "loop,noatime", image.name, str(directory)]):
            subprocess.run(command, check=True, capture_output=True, timeout=MOUNT_S)
        try:
            (directory / "lost+found").rmdir()
            yield
        finally:
            thaw(directory)
            subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=MOUNT_S)


def freeze(directory: Path, longest_s: float) -> None:
    """Freeze a file system: whoever writes to it waits. A process of its own thaws it after `longest_s`, whatever
    becomes of this one.

    Raises:
        subprocess.CalledProcessError: it cannot be frozen.
    """
    environment = {"PATH": os.environ.get("PATH", os.defpath)}  # it is no process of the run
    subprocess.Popen(["sh", "-c", 'sleep "$1"; exec fsfreeze --unfreeze "$2"', "sh", f"{longest_s:g}", str(directory)],
                     env=environment, cwd="/", start_new_session=True, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run(["fsfreeze", "--freeze", str(directory)], check=True, capture_output=True, timeout=longest_s)


def thaw(directory: Path) -> None:
    """Thaw a file system; does nothing where it is not frozen."""
    subprocess.run(["fsfreeze", "--unfreeze", str(directory)], capture_output=True, timeout=MOUNT_S)


def probe_freezing() -> str | None:
    """Try to freeze a file system of its own; returns why that is not possible, None if it is."""
    if os.geteuid():
        return "this requires root"
    try:
        with tempfile.TemporaryDirectory() as directory, own_disk(Path(directory, "disk")):
            freeze(Path(directory, "disk"), 2 * MOUNT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None
