"""A rank's part of a checkpoint: the files that hold the state of its engine and random numbers, and their loading."""

from functools import partial
from pathlib import Path

import torch

from rlhf_ray.checkpoint.rng import rng_state, set_rng_state
from rlhf_ray.checkpoint.state_files import load_tensors
from rlhf_ray.engine.deepspeed_engine import TrainEngine
from rlhf_ray.models.lora import ADAPTERS_FILE, Adapters, check_adapter_description, save_adapter_description
from rlhf_ray.roles.async_checkpoint import AsyncCheckpointWriter, SaveProgress, Writers


class LearnerState:
    """State of the engine and random numbers of one rank."""

    def __init__(self, engine: TrainEngine, adapters: Adapters | None, rank: int) -> None:
        self._engine, self._adapters, self._rank = engine, adapters, rank
        self._writer = AsyncCheckpointWriter()

    def begin_save(self, directory: Path, more: Writers) -> None:
        """Start writing a copy made now, and `more`, to `directory`; training may continue meanwhile. One at a time."""
        described = self._adapters if self._rank == 0 else None
        self._writer.begin(directory, {
            f"rank_{self._rank}.safetensors": self._engine.snapshot().write,
            f"rng_{self._rank}.pt": partial(torch.save, rng_state()),
            **({ADAPTERS_FILE: partial(save_adapter_description, described)} if described else {}), **more})

    def save_progress(self) -> SaveProgress:
        """Progress of the last `begin_save`; errors as in `AsyncCheckpointWriter.progress`."""
        return self._writer.progress()

    def load(self, directory: Path) -> None:
        """Restore what `begin_save` wrote. The caller has verified the files.

        Raises:
            CheckpointError: there is no state, or its adapters have another base model or shape.
        """
        check_adapter_description(self._adapters, directory)
        self._engine.load(directory)
        if (own := directory / f"rng_{self._rank}.pt").is_file():  # otherwise there were fewer ranks
            set_rng_state(load_tensors(own))
