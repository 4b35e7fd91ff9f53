"""An exponential moving average of the weights under training (Polyak and Juditsky 1992; Ouyang et al. 2022, app. C.4).

Every rank keeps the average of its own shard of every trained parameter, in float32, under all ZeRO stages: it costs
one model's memory over all ranks together and nothing travels until the average is asked for.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_ray.checkpoint.tensors import load_tensors
from rlhf_ray.engine.parameter_shards import full_shape, gather_shards, own_shard, shard_of
from rlhf_ray.errors import CheckpointError


class WeightAverage:
    """average <- decay x average + (1 - decay) x weights, beginning with the weights as they are.

    It is updated after each optimizer step: that is where InstructGPT's 0.992 is used by the public trainers that have
    one (DeepSpeed-Chat, OpenRLHF), and the average then does not jump when epochs or mini-batches are changed.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Call it on every rank, once the module is under DeepSpeed's care."""
        self.decay = decay
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._shards = {name: shard.to(torch.float32, copy=True) for name, shard in self._weights()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in."""
        for name, weights in self._weights():
            self._shards[name].lerp_(weights.float(), 1 - self.decay)

    def gather(self, names: list[str], others: Callable[[list[str]], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Whole averages by name, on the CPU; a collective call.

        Args:
            names: of parameters of the inner model (`module.model`).
            others: gives those that are not trained, and so have no average.
        """
        averaged = [name for name in names if f"model.{name}" in self._shards]
        rest = [name for name in names if name not in averaged]
        found = others(rest) if rest else {}
        for name in averaged:
            shape = full_shape(self._parameters[f"model.{name}"])
            found[name] = gather_shards(self._shards[f"model.{name}"], shape).cpu()
        return found

    def copy(self) -> dict[str, Tensor]:
        """A copy of this rank's shards, for `torch.save`."""
        return {name: shard.to("cpu", copy=True) for name, shard in self._shards.items()}

    def load(self, *paths: Path) -> None:
        """Take back the shards of all ranks from files, in their order, however many there were.

        Raises:
            CheckpointError: nothing was saved, or other parameters.
        """
        if not paths:
            raise CheckpointError("the checkpoint has no average of the weights: the run that saved it had no "
                                  "policy.ema_decay. Leave it empty to go on, or begin a new run.")
        saved = [load_tensors(path) for path in paths]
        for name, shard in self._shards.items():
            numel = full_shape(self._parameters[name]).numel()
            parts = [found[name] for found in saved if name in found]
            if [len(part) for part in parts] != [-(-numel // len(saved))] * len(saved):
                raise CheckpointError(f"{paths[0].parent} holds averages of other weights than this run trains: "
                                      f"{name} is not there, or of another size")
            shard.copy_(shard_of(torch.cat(parts)[:numel]))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, own_shard(parameter)
