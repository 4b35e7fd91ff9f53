"""A learner's weights as its checkpoint has them, in one process and without DeepSpeed: what an export needs of
`TrainEngine`."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from rlhf_ray.engine.ema import SavedAverage, average_files
from rlhf_ray.engine.training_state import WEIGHTS, TrainingState
from rlhf_ray.errors import CheckpointError


class SavedWeights:
    """The module with the trained parameters of a checkpoint, which are read one by one when they are asked for.

    Example:
        >>> saved = SavedWeights(module, Path("run/checkpoints/step_40/policy_learner"))
        >>> saved.gather(["lm_head.weight"])["lm_head.weight"].shape
        torch.Size([151936, 896])
    """

    device = "cpu"

    def __init__(self, module: nn.Module, directory: Path) -> None:
        """
        Args:
            module: as a learner builds it. Its trained parameters are emptied, so that only one copy is in memory.
            directory: a learner's part of a checkpoint; the caller has verified the files.

        Raises:
            CheckpointError: `directory` holds no learner state, or that of another model.
        """
        self.module, self._directory, self._saved = module, directory, TrainingState(directory)
        parameters = dict(module.named_parameters())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if self._saved.names() != self._trained:
            raise CheckpointError(f"{directory} holds the state of other parameters than this run trains: "
                                  f"{sorted(self._saved.names() ^ self._trained)[:3]} are in only one of the two. "
                                  "Restore the model and the configuration that the run was started with")
        for name in self._trained:
            parameters[name].data = parameters[name].data.new_empty(0)

    def parameter_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """As `TrainEngine.parameter_shapes`."""
        return [(name, self._shapes[f"model.{name}"]) for name, _ in self.module.model.named_parameters()]

    def whole(self, name: str) -> Tensor:
        """A trained parameter of the module."""
        shape = self._shapes[name]
        return cast(Tensor, self._saved.whole(WEIGHTS, name, torch.Size(shape).numel())).view(shape)

    def gather(self, names: list[str], wanted: bool = True) -> dict[str, Tensor]:
        """As `TrainEngine.gather`."""
        own = dict(self.module.model.named_parameters())
        return {name: self.whole(f"model.{name}") if f"model.{name}" in self._trained else own[name].detach()
                for name in names if wanted}

    def average(self) -> SavedAverage:
        """The average of the weights.

        Raises:
            CheckpointError: the checkpoint has none.
        """
        return SavedAverage(*average_files(self._directory))

    def gather_average(self, average: SavedAverage, names: list[str], wanted: bool = True) -> dict[str, Tensor]:
        """As `WeightAverage.gather`."""
        averaged = [name for name in names if f"model.{name}" in self._trained]
        tensors = self.gather([name for name in names if name not in averaged], wanted)
        for name in averaged:
            shape = self._shapes[f"model.{name}"]
            tensors[name] = average.whole(f"model.{name}", torch.Size(shape).numel()).view(shape)
        return tensors
