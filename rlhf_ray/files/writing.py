"""Files that are replaced whole, and JSON lines that are appended: the one way in which small files are written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

from rlhf_ray.files.fsync import fsync_descriptor, fsync_path, operation

PIECE = 2**18
"""Bytes of a long file that are read at a time from its end."""


class Owner(Protocol):
    """The right to write into a directory, which another process may take over (`observability.owner_record.Term`)."""

    @property
    def mark(self) -> str:
        """Part of the names of temporary files."""

    def check(self) -> None:
        """Raise SupersededError once another process owns the directory."""

    def renaming(self) -> AbstractContextManager[None]:
        """Check before a rename, and again when it fails."""


def try_to_write(directory: Path, flush: bool = True) -> None:
    """Make a directory if it does not exist, and write a file there that is removed again.

    Args:
        flush: whether to flush it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(4096))
        file.flush()
        if flush:
            fsync_descriptor(file.fileno(), directory)


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
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    truncate_lines(path, lambda _: True, owner)
            file.write(json_lines(rows))


def truncate_lines(path: Path, keep: Callable[[bytes], bool], owner: Owner | None = None) -> None:
    """Remove the lines after the last one to keep; a file that is missing stays so. Reads no further than that line.

    Args:
        keep: whether a line is to be kept; a line for which it raises ValueError, KeyError or TypeError is not.
        owner: of the run's directory, where the file lies in one.

    Raises:
        SupersededError: another driver owns the directory now; nothing is removed.
    """
    if not path.exists():
        return
    end = 0
    for start, line in lines_from_end(path):
        with suppress(ValueError, KeyError, TypeError):
            if line.endswith(b"\n") and keep(line):
                end = start + len(line)
                break
    with operation("truncate", path):
        if owner is not None:
            owner.check()
        os.truncate(path, end)


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their line breaks, from the last (which may lack one) to the first, each with its
    offset. Reads a piece at a time."""
    with path.open("rb") as file:
        start, first = file.seek(0, os.SEEK_END), b""
        while start:
            size = min(PIECE, start)
            start -= size
            file.seek(start)
            read = file.read(size) + first
            offset, (*whole, last) = start + len(read), read.split(b"\n")
            lines = [line + b"\n" for line in whole] + ([last] if last else [])
            first = lines[0]
            for line in reversed(lines[1:]):
                offset -= len(line)
                yield offset, line
        if first:
            yield 0, first
