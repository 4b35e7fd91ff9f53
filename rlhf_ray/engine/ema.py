"""An exponential moving average of the weights under training (Polyak and Juditsky 1992; Ouyang et al. 2022, app. C.4).

Under every ZeRO stage each rank averages its own shard of every trained parameter, in float32. That takes the memory of
one model over all ranks together, and no communication until the average is gathered.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_ray.checkpoint.state_files import load_tensors
from rlhf_ray.engine.parameter_shards import gather_shards, own_shard, shard_of
from rlhf_ray.errors import CheckpointError
from rlhf_ray.internals.deepspeed import full_shape


def average_files(directory: Path) -> list[Path]:
    """The files of all ranks in a learner's part of a checkpoint, in rank order."""
    return [directory / f"average_{rank}.pt" for rank in range(len(list(directory.glob("average_*.pt"))))]


class SavedAverage:
    """The average in the files of all ranks."""

    def __init__(self, *paths: Path) -> None:
        """
        Args:
            paths: the files, in rank order.

        Raises:
            CheckpointError: there are no files.
        """
        if not paths:
            raise CheckpointError("the checkpoint has no average of the weights: it was saved without "
                                  "policy.ema_decay. Leave policy.ema_decay empty to resume, or start a new run.")
        self._directory = paths[0].parent
        self._saved = [load_tensors(path, mapped=True) for path in paths]

    def whole(self, name: str, numel: int) -> Tensor:
        """[numel] the flattened average of one parameter.

        Raises:
            CheckpointError: the files hold other parameters.
        """
        parts = [shards[name] for shards in self._saved if name in shards]
        if [len(part) for part in parts] != [-(-numel // len(self._saved))] * len(self._saved):
            raise CheckpointError(f"{self._directory} holds averages of other weights than this run trains: "
                                  f"{name} is missing or has another size. Resume with the model it was saved "
                                  "with, or start a new run.")
        return torch.cat(parts)[:numel]


class WeightAverage:
    """average <- decay x average + (1 - decay) x weights, starting at the current weights.

    It is updated after each optimizer step, as in the public trainers that use InstructGPT's 0.992 (DeepSpeed-Chat,
    OpenRLHF). So a change of epochs or mini-batches causes no jump in the average.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Call it on every rank, after DeepSpeed has wrapped the module."""
        self.decay = decay
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._shards = {name: shard.to(torch.float32, copy=True) for name, shard in self._weights()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        for name, weights in self._weights():
            self._shards[name].lerp_(weights.float(), 1 - self.decay)

    def gather(
        self, names: list[str], wanted: bool, gather_frozen: Callable[[list[str], bool], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Whole averages by name, on their device; a collective call.

        Args:
            names: names of parameters of the inner model (`module.model`).
            wanted: as for `TrainEngine.gather`.
            gather_frozen: gathers parameters that are not trained and have no average.
        """
        averaged = [name for name in names if f"model.{name}" in self._shards]
        frozen = [name for name in names if name not in averaged]
        tensors = gather_frozen(frozen, wanted) if frozen else {}
        for name in averaged:
            shape = full_shape(self._parameters[f"model.{name}"])
            tensors[name] = gather_shards(self._shards[f"model.{name}"], shape)
        return tensors if wanted else {}

    def copy(self) -> dict[str, Tensor]:
        """A copy of this rank's shards, for `torch.save`."""
        return {name: shard.to("cpu", copy=True) for name, shard in self._shards.items()}

    def load(self, *paths: Path) -> None:
        """Restore the average from the files of all ranks, in rank order; the number of ranks may have changed.

        Raises:
            CheckpointError: there are no files, or they hold other parameters.
        """
        saved = SavedAverage(*paths)
        for name, shard in self._shards.items():
            shard.copy_(shard_of(saved.whole(name, full_shape(self._parameters[name]).numel())))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, own_shard(parameter)
