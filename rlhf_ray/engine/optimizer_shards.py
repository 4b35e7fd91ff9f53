"""Which slice of which parameter each rank saves and restores, at every ZeRO stage, and where AdamW keeps its state.

At stage 0 every rank holds all parameters and saves an equal share; at stages 1 and 2 its partition of the flattened
parameters; at stage 3 its shard. The slices of all ranks together cover every parameter exactly once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rlhf_ray.internals.deepspeed import Fragment, full_shape, partitioned_fragment, sharded_fragment

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per weight (Kingma and Ba 2015: m and v)."""


@dataclass(frozen=True)
class OptimizerShard:
    """A slice of one flattened parameter."""

    name: str
    numel: int
    """Elements of the whole parameter."""
    start: int
    weights: Tensor
    """[length] the weights that the optimizer updates; a view."""
    owner: Tensor
    """The key of its state in `wrapped_optimizer`: the parameter itself, or the flat tensor that holds many."""
    offset: int
    """Where the slice begins in the flattened owner."""

    def view_of(self, like_owner: Tensor) -> Tensor:
        """[length] this slice of a tensor of the owner's shape; a view."""
        return like_owner.view(-1).narrow(0, self.offset, len(self.weights))

    @property
    def stop(self) -> int:
        """Where the slice ends in the flattened parameter."""
        return self.start + len(self.weights)


def optimizer_shards(
    engine: Any, stage: int, parameters: Mapping[str, nn.Parameter], whole: bool = False
) -> Iterator[OptimizerShard]:
    """The slices of this rank.

    Args:
        engine: DeepSpeed's engine.
        parameters: the trained parameters by name.
        whole: at stage 0, where every rank updates every weight: whole parameters instead of this rank's share.
    """
    for name, parameter in parameters.items():
        fragment = _replicated(parameter, whole) if stage == 0 else (
            sharded_fragment(parameter, engine.optimizer, dist.get_rank()) if stage == 3
            else partitioned_fragment(parameter, engine.optimizer))
        if fragment is not None and len(fragment.weights):
            yield OptimizerShard(name, full_shape(parameter).numel(), *fragment)


def _replicated(parameter: nn.Parameter, whole: bool) -> Fragment:
    flat, ranks = parameter.data.view(-1), dist.get_world_size()
    size = -(-len(flat) // ranks)
    start, stop = (0, len(flat)) if whole else (dist.get_rank() * size, (dist.get_rank() + 1) * size)
    return Fragment(start, flat[start:stop], parameter, start)
