"""Files written beside the work: a learner copies its state, trains on, and a thread puts the copies on disk."""

import errno
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rlhf_ray.checkpoint.atomic import fsync_path
from rlhf_ray.checkpoint.disk import is_disk_full
from rlhf_ray.errors import CheckpointError

Writers = Mapping[str, Callable[[Path], object]]
"""By file name, what writes it. What it writes is a copy: nobody changes it meanwhile."""


class Saving:
    """One directory at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._under_way: Future[None] | None = None

    def begin(self, directory: Path, writers: Writers) -> None:
        """Begin to write files into `directory`, which is made if it is missing."""
        self._under_way = self._thread.submit(_write, directory, writers)

    def over(self, wait: bool = False) -> bool:
        """Whether what was begun last is on disk.

        Args:
            wait: until it is.

        Raises:
            CheckpointError: the disk is full.
            OSError: it cannot be written.
        """
        if self._under_way is None or not (wait or self._under_way.done()):
            return self._under_way is None
        under_way, self._under_way = self._under_way, None
        under_way.result()
        return True


def _write(directory: Path, writers: Writers) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            write(directory / name)
            fsync_path(directory / name)  # here: the driver may be on another machine
    except Exception as error:
        # Only here can that be told: torch speaks of a stream's position.
        if is_disk_full(error, directory):
            raise CheckpointError(f"{os.strerror(errno.ENOSPC)}: {directory}") from error
        raise
