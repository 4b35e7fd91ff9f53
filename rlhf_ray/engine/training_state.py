"""A learner's state on disk: weights and AdamW's moments by parameter name, one file per rank with that rank's slices.

The format does not depend on the number of ranks or on the ZeRO stage, so both may change at a resume: each rank joins
whole tensors from all files and takes the part it needs. The files are safetensors, which cannot contain code.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_ray.engine.optimizer_shards import MOMENTS, OptimizerShard
from rlhf_ray.errors import CheckpointError

WEIGHTS = "weights"


@dataclass(frozen=True)
class Snapshot:
    """A copy of one rank's part, so training may continue while it is written."""

    tensors: Mapping[str, Tensor]
    """Keys are "kind:start:parameter"."""
    notes: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path) -> None:
        """Write the copy to a file."""
        from safetensors.torch import save_file

        save_file(dict(self.tensors), path, metadata={"notes": json.dumps(self.notes)})


def snapshot(shards: Iterable[OptimizerShard], states: Mapping[Tensor, Mapping[str, Any]], notes: Mapping[str, Any]
             ) -> Snapshot:
    """Copy this rank's slices.

    Args:
        states: the optimizer's state by `OptimizerShard.owner`; empty before its first step.
        notes: counters of the engine, the same on all ranks.
    """
    tensors, steps = {}, {}
    for shard in shards:
        state = states.get(shard.owner, {})
        tensors[f"{WEIGHTS}:{shard.start}:{shard.name}"] = shard.weights.to("cpu", copy=True)
        for moment in MOMENTS:
            if moment in state:
                tensors[f"{moment}:{shard.start}:{shard.name}"] = shard.view_of(state[moment]).to("cpu", copy=True)
                steps[shard.name] = int(state["step"])
    return Snapshot(tensors, {**notes, "steps": steps})


class TrainingState:
    """The files that all ranks wrote to a directory."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            CheckpointError: no file is there, one is not a learner's state, or a rank's file is missing.
        """
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        self._spans: dict[tuple[str, str], list[tuple[int, Any, str]]] = defaultdict(list)
        self.notes: dict[str, Any] = {"steps": {}}
        files = sorted(directory.glob("rank_*.safetensors"))
        for path in files:
            try:
                file = safe_open(path, "pt")
                notes = json.loads(file.metadata()["notes"])
            except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
                raise CheckpointError(f"{path} is not a learner's state: {error}. Use another "
                                      "checkpoint.") from error
            self.notes = {**notes, "steps": {**self.notes["steps"], **notes["steps"]}}
            for key in file.keys():  # noqa: SIM118 - not a mapping
                kind, start, name = key.split(":", 2)
                self._spans[kind, name].append((int(start), file, key))
        if not files or self.notes["world"] != len(files):
            raise CheckpointError(f"{directory} holds no learner state to load: {len(files)} files of "
                                  f"{self.notes.get('world', 'unknown')} ranks. Use another checkpoint (earlier "
                                  "versions wrote another layout), or start a new run.")

    def names(self) -> set[str]:
        """Names of the parameters whose weights are saved."""
        return {name for kind, name in self._spans if kind == WEIGHTS}

    def whole(self, kind: str, name: str, numel: int) -> Tensor | None:
        """[numel] the flattened tensor of one parameter; None if none was saved.

        Raises:
            CheckpointError: the saved slices do not cover the parameter exactly.
        """
        spans = sorted(self._spans.get((kind, name), ()), key=lambda span: span[0])
        if not spans:
            return None
        parts, reached = [], 0
        for start, file, key in spans:
            if start != reached:
                break
            parts.append(file.get_tensor(key))
            reached += len(parts[-1])
        if reached != numel or len(parts) < len(spans):
            raise CheckpointError(f"{self._directory} holds {kind} of {name} in {len(spans)} slices that do "
                                  f"not cover the {numel} elements of this run's parameter: it belongs to another "
                                  "model. Resume with that model, or start a new run.")
        return torch.cat(parts)
