"""Which file systems SQLite's write-ahead log may lie on: only those of one machine, since its index is memory that the
processes of a machine share (https://www.sqlite.org/wal.html: "All processes using a database must be on the same host
computer; WAL does not work over a network filesystem")."""

from __future__ import annotations

import re
from pathlib import Path

LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs",
                   "ramfs", "overlay", "aufs", "ntfs3", "exfat", "vfat"})
"""Kinds of one machine. All others (nfs4, cifs, lustre, gpfs, ceph, beegfs, 9p, virtiofs, fuse.*) may be shared."""
_MOUNTS = Path("/proc/self/mountinfo")


def is_local(path: Path) -> bool:
    """Whether a file lies on a file system that only this machine has; False where that cannot be told."""
    return kind_of(path) in LOCAL


def kind_of(path: Path) -> str | None:
    """The kind of file system that a file lies on, or will; None where the system does not say."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    place, best, kind = path.absolute().resolve(), Path(), None
    for line in lines:  # a later mount hides earlier ones at its place
        before, _, after = line.partition(" - ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        if place.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, after.split()[0]
    return kind
