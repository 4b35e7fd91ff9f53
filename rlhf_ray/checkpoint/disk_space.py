"""Free disk space: checks before writing, and recognition of errors of a full disk."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from rlhf_ray.errors import CheckpointError

_NEARLY_NOTHING = 1 << 16


def free_bytes(path: Path) -> int:
    """Bytes free for this user on the file system of `path` or of its nearest existing parent."""
    place = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(place).free


def require_space(path: Path, needed: int, what: str, consequence: str) -> None:
    """Raise CheckpointError when fewer than `needed` bytes are free at `path`.

    Args:
        what: what will be written, for the message.
        consequence: what is still intact, for the message.
    """
    free = free_bytes(path)
    if free < needed:
        raise CheckpointError(
            f"{what} needs about {mib(needed)} and {path} has {mib(free)} free; {consequence}. "
            "Free some space or lower checkpoint.keep"
        )


def is_disk_full(error: BaseException, path: Path) -> bool:
    """Whether `error` was caused by a full disk (or quota) at `path`.

    Writers report it differently: Python raises OSError(ENOSPC), safetensors an error of its own with the same message,
    torch.save a RuntimeError about a stream position. The last counts only if the disk is full right now.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
        return True
    return isinstance(error, (OSError, RuntimeError)) and free_bytes(path) < _NEARLY_NOTHING


def disk_full_error(path: Path, what: str, written: int, consequence: str) -> CheckpointError:
    """The error to raise after the partial files have been removed."""
    return CheckpointError(
        f"the disk of {path} ran full: {what} needs more than the {mib(written)} written, and {mib(free_bytes(path))} "
        f"are free now that these were removed; {consequence}. Free some space or lower checkpoint.keep"
    )


def mib(count: int) -> str:
    """Bytes as text in MiB."""
    return f"{count / 2**20:.1f} MiB"
