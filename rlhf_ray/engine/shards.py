"""A rank's equal share of a parameter, and whole tensors out of all ranks' shares.

A share is a stretch of the flattened parameter, as ZeRO-3 cuts them. Under the lower stages, where each rank holds
parameters whole, the same cut shares out what is kept beside them.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter, also where this rank holds a shard of it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def own_shard(parameter: nn.Parameter) -> Tensor:
    """[ceil(numel / ranks)] this rank's share; zeros fill the last one up. Not a copy where none is needed."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.detach().view(-1)
    return share_of(parameter.detach().reshape(-1))


def share_of(flat: Tensor) -> Tensor:
    """[ceil(numel / ranks)] this rank's share of a flattened tensor that it holds whole."""
    size = -(-flat.numel() // dist.get_world_size())
    share = flat[dist.get_rank() * size : (dist.get_rank() + 1) * size]
    return pad(share, (0, size - share.numel()))


def whole(shard: Tensor, shape: torch.Size) -> Tensor:
    """The tensor of `shape` whose shares the ranks give; a collective call, and the same answer on all of them."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts)[: shape.numel()].view(shape)
