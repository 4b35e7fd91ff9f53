"""Files written beside the work: a learner copies its state, trains on, and a thread puts the copies on disk."""

import errno
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rlhf_ray.checkpoint.disk_space import is_disk_full
from rlhf_ray.errors import CheckpointError
from rlhf_ray.files.fsync import fsync_path, operation
from rlhf_ray.files.thread import FileThread

Writers = Mapping[str, Callable[[Path], object]]
"""By file name, what writes it. What it writes is a copy: nobody changes it meanwhile."""


@dataclass(frozen=True)
class SaveProgress:
    """How far a rank's part of a checkpoint is."""

    over: bool
    """Whether it is on disk."""
    moved: tuple[int, int]
    """Changes with everything that is done for it; see `FileThread.moved`."""
    doing: str
    """The file operation under way."""


class AsyncCheckpointWriter:
    """One directory at a time."""

    def __init__(self) -> None:
        self._thread = FileThread("saving", float("inf"))  # who asks has the deadline
        self._under_way: Future[None] | None = None

    def begin(self, directory: Path, writers: Writers) -> None:
        """Begin to write files into `directory`, which is made if it is missing."""
        self._under_way = self._thread.submit(_write, directory, writers)

    def saved(self) -> SaveProgress:
        """How far what was begun last is.

        Raises:
            CheckpointError: the disk is full.
            OSError: it cannot be written.
        """
        if self._under_way is not None and self._under_way.done():
            self.wait()
        return SaveProgress(self._under_way is None, self._thread.moved, self._thread.progress.doing)

    def wait(self) -> None:
        """Wait for what was begun last; errors as in `saved`."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()


def _write(directory: Path, writers: Writers) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            with operation("write", directory / name):
                write(directory / name)
            fsync_path(directory / name)  # here: the driver may be on another machine
    except Exception as error:
        # Only here can that be told: torch speaks of a stream's position.
        if is_disk_full(error, directory):
            raise CheckpointError(f"{os.strerror(errno.ENOSPC)}: {directory}") from error
        raise
