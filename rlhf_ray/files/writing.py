"""Files that are replaced whole, and JSON lines that are appended: the one way in which small files are written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rlhf_ray.files.fsync import fsync_descriptor, fsync_path, operation


class Owner(Protocol):
    """The right to write into a directory, which another process may take over (`observability.owner_record.Term`)."""

    @property
    def mark(self) -> str:
        """Part of the names of temporary files."""

    def check(self) -> None:
        """Raise SupersededError once another process owns the directory."""

    def renaming(self) -> AbstractContextManager[None]:
        """Check before a rename, and again when it fails."""


def write_atomically(target: Path, data: bytes, owner: Owner | None = None) -> None:
    """Replace `target` so that a reader, or the next process after a crash, sees the old bytes or all the new ones.

    Args:
        owner: of the run's directory, where `target` lies in one.

    Raises:
        SupersededError: another driver owns the directory now; `target` is as that driver has it.
    """
    mark = f"{owner.mark}-" if owner else ""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.{mark}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            fsync_descriptor(file.fileno(), target)
        os.chmod(name, 0o644)  # mkstemp gives 0600: a run's files are for its readers too
        with owner.renaming() if owner else nullcontext():
            os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_path(target.parent)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as JSON, one a line."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]], owner: Owner | None = None) -> None:
    """Append rows to a file, which is created if it is missing; they are not flushed to disk. A torn last line, left by
    a crash or a full disk, is removed first.

    Args:
        owner: of the run's directory, where the file lies in one.

    Raises:
        OSError: the file cannot be written.
        SupersededError: another driver owns the directory now; nothing is written.
    """
    with operation("write", path):
        if owner is not None:
            owner.check()
        with path.open("a+b") as file:
            _remove_torn_line(file)
            file.write(json_lines(rows))


def _remove_torn_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if not size:
        return
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
