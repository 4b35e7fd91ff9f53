"""A /dev/shm of this process's own, so that whatever is left there was left by its runs."""

from __future__ import annotations

import ctypes
import os
import subprocess

CLONE_NEWNS = 0x00020000
"""unshare(2): a mount namespace of its own."""
MOUNTS = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])


def own_shared_memory() -> bool:
    """Mount another /dev/shm for this process and all that it starts; nobody else sees it, and it ends with them.

    Returns:
        Whether that was possible: it requires root. Otherwise somebody else's segments may be seen there.
    """
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    return all(subprocess.run(command, capture_output=True).returncode == 0 for command in MOUNTS)
