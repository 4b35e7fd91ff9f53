"""Asynchronous checkpoints: a learner copies its state and trains on while a thread writes the copies to disk."""

import errno
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rlhf_ray.checkpoint.disk_space import is_disk_full
from rlhf_ray.errors import CheckpointError
from rlhf_ray.files.fsync import fsync_path, operation
from rlhf_ray.files.writer_thread import FileThread

Writers = Mapping[str, Callable[[Path], object]]
"""Functions by file name that write the file. They hold copies, which do not change meanwhile."""


@dataclass(frozen=True)
class SaveProgress:
    """Progress of writing a rank's part of a checkpoint."""

    done: bool
    """Whether the part is on disk."""
    moved: tuple[int, int]
    """Changes with every file operation; see `FileThread.moved`."""
    doing: str
    """The current file operation."""


class AsyncCheckpointWriter:
    """Writes one directory at a time on a thread."""

    def __init__(self) -> None:
        self._thread = FileThread("saving", float("inf"))  # callers have deadlines
        self._pending: Future[None] | None = None

    def begin(self, directory: Path, writers: Writers) -> None:
        """Start writing files into `directory`, which is created if it is missing."""
        self._pending = self._thread.submit(_write, directory, writers)

    def progress(self) -> SaveProgress:
        """Progress of the last `begin`.

        Raises:
            CheckpointError: the disk is full.
            OSError: a file cannot be written.
        """
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            pending.result()
        return SaveProgress(self._pending is None, self._thread.moved, self._thread.progress.doing)


def _write(directory: Path, writers: Writers) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            with operation("write", directory / name):
                write(directory / name)
            fsync_path(directory / name)  # on this machine: the driver may be on another
    except Exception as error:
        # Checked here because torch reports a full disk as an error about a stream position.
        if is_disk_full(error, directory):
            raise CheckpointError(f"{os.strerror(errno.ENOSPC)}: {directory}") from error
        raise
