"""Which slice of which parameter each rank saves and restores, at every ZeRO stage, and where AdamW keeps its state.

At stage 0 every rank holds all parameters and saves an equal share; at stages 1 and 2 its partition of the flattened
parameters; at stage 3 its shard. The slices of all ranks together cover every parameter exactly once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    """The optimizer's key for its state: the parameter itself, or the flat tensor that holds many parameters."""
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
        if stage == 0:
            yield from _replicated(name, parameter, whole)
        elif stage == 3:
            yield from _sharded(name, parameter, engine.optimizer)
        else:
            yield from _partitioned(name, parameter, engine.optimizer)


def inner_optimizer(engine: Any, stage: int) -> torch.optim.Optimizer:
    """The AdamW that DeepSpeed wraps; its state is keyed by `OptimizerShard.owner`."""
    optimizer: torch.optim.Optimizer = engine.optimizer.optimizer if stage else engine.optimizer
    return optimizer


def _replicated(name: str, parameter: nn.Parameter, whole: bool) -> Iterator[OptimizerShard]:
    flat, ranks = parameter.data.view(-1), dist.get_world_size()
    size = -(-len(flat) // ranks)
    start, stop = (0, len(flat)) if whole else (dist.get_rank() * size, min(len(flat), (dist.get_rank() + 1) * size))
    if start < stop:
        yield OptimizerShard(name, len(flat), start, flat[start:stop], parameter, start)


def _partitioned(name: str, parameter: nn.Parameter, optimizer: Any) -> Iterator[OptimizerShard]:
    mapping = parameter._hp_mapping
    if mapping is not None:  # otherwise the parameter is in other ranks' partitions
        owner = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        yield OptimizerShard(name, parameter.numel(), mapping.lp_fragment_address.start, mapping.hp_fragment.data,
                             owner, mapping.hp_fragment_address.start)


def _sharded(name: str, parameter: Any, optimizer: Any) -> Iterator[OptimizerShard]:
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = dist.get_rank() * size
    length = min(size, parameter.ds_numel - start)  # the last shards may be padded
    if length > 0:
        owner = optimizer.fp32_partitioned_groups_flat[group]
        yield OptimizerShard(name, parameter.ds_numel, start, owner.data.narrow(0, offset, length), owner, offset)
