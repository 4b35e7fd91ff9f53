"""A rank's part of a checkpoint: the files that hold the state of its engine and random numbers. The learner copies its
state and trains on while a thread writes the copies to disk."""

import errno
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rlhf_ray.checkpoint.disk_space import is_disk_full
from rlhf_ray.checkpoint.rng import rng_state, set_rng_state
from rlhf_ray.checkpoint.state_files import load_tensors
from rlhf_ray.engine.deepspeed_engine import TrainEngine
from rlhf_ray.errors import CheckpointError
from rlhf_ray.files.fsync import fsync_path, operation
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.models.lora import ADAPTERS_FILE, Adapters, check_adapter_description, save_adapter_description

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


class LearnerState:
    """State of the engine and random numbers of one rank."""

    def __init__(self, engine: TrainEngine, adapters: Adapters | None, rank: int) -> None:
        self._engine, self._adapters, self._rank = engine, adapters, rank
        self._thread = FileThread("saving", float("inf"))  # callers have deadlines
        self._pending: Future[None] | None = None

    def begin_save(self, directory: Path, more: Writers) -> None:
        """Start writing a copy made now, and `more`, to `directory`, which is created if it is missing; training may
        continue meanwhile. One at a time."""
        described = self._adapters if self._rank == 0 else None
        self._pending = self._thread.submit(_write, directory, {
            f"rank_{self._rank}.safetensors": self._engine.snapshot().write,
            f"rng_{self._rank}.pt": partial(torch.save, rng_state()),
            **({ADAPTERS_FILE: partial(save_adapter_description, described)} if described else {}), **more})

    def save_progress(self) -> SaveProgress:
        """Progress of the last `begin_save`.

        Raises:
            CheckpointError: the disk is full.
            OSError: a file cannot be written.
        """
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            pending.result()
        return SaveProgress(self._pending is None, self._thread.moved, self._thread.progress.doing)

    def load(self, directory: Path) -> None:
        """Restore what `begin_save` wrote. The caller has verified the files.

        Raises:
            CheckpointError: there is no state, or its adapters have another base model or shape.
        """
        check_adapter_description(self._adapters, directory)
        self._engine.load(directory)
        if (own := directory / f"rng_{self._rank}.pt").is_file():  # otherwise there were fewer ranks
            set_rng_state(load_tensors(own))


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
