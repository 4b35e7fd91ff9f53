"""A learner's state on disk: weights and AdamW's moments by the parameter's name, of each rank what it answers for.

Nothing in it depends on how many ranks there were or at which ZeRO stage, so another number of them, at another stage,
can go on from it: whole tensors are put together from all ranks' files, and each takes what it needs. The files are
safetensors, which hold numbers and names and nothing that could run.
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
    """One rank's part, in memory of its own: training may go on while it is written."""

    tensors: Mapping[str, Tensor]
    """By "kind:start:parameter"."""
    notes: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path) -> None:
        """Write it to a file."""
        from safetensors.torch import save_file

        save_file(dict(self.tensors), path, metadata={"notes": json.dumps(self.notes)})


def snapshot(shards: Iterable[OptimizerShard], states: Mapping[Tensor, Mapping[str, Any]], notes: Mapping[str, Any]
             ) -> Snapshot:
    """Copy what this rank answers for.

    Args:
        states: what the optimizer keeps, by `Portion.owner`; nothing before its first step.
        notes: numbers about the engine, the same on all ranks.
    """
    tensors, steps = {}, {}
    for shard in shards:
        state = states.get(shard.owner, {})
        tensors[f"{WEIGHTS}:{shard.start}:{shard.name}"] = shard.weights.to("cpu", copy=True)
        for moment in MOMENTS:
            if moment in state:
                tensors[f"{moment}:{shard.start}:{shard.name}"] = shard.of(state[moment]).to("cpu", copy=True)
                steps[shard.name] = int(state["step"])
    return Snapshot(tensors, {**notes, "steps": steps})


class TrainingState:
    """What all ranks wrote to a directory."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            CheckpointError: there is nothing, something is not such a file, or a rank's is missing.
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
                raise CheckpointError(f"{path} is no learner's state and was not read: {error}") from error
            self.notes = {**notes, "steps": {**self.notes["steps"], **notes["steps"]}}
            for key in file.keys():  # noqa: SIM118 - no mapping
                kind, start, name = key.split(":", 2)
                self._spans[kind, name].append((int(start), file, key))
        if not files or self.notes["world"] != len(files):
            raise CheckpointError(f"{directory} holds no learner state to load: {len(files)} files of "
                                  f"{self.notes.get('world', 'unknown')} ranks. Use another checkpoint (earlier "
                                  "versions wrote another layout), or begin a new run.")

    def names(self) -> set[str]:
        """Parameters whose weights there are."""
        return {name for kind, name in self._spans if kind == WEIGHTS}

    def whole(self, kind: str, name: str, numel: int) -> Tensor | None:
        """[numel] the flattened tensor of one parameter; None where there was none.

        Raises:
            CheckpointError: the stretches are not exactly the parameter.
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
            raise CheckpointError(f"{self._directory} holds {kind} of {name} in {len(spans)} stretches that are "
                                  f"not the {numel} numbers of this run's parameter: it is another model's")
        return torch.cat(parts)
