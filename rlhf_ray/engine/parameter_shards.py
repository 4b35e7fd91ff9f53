"""Each rank's equal shard of every parameter: sharding a model, cutting a tensor, gathering whole tensors.

A shard is a contiguous range of the flattened parameter, as ZeRO-3 cuts it. Under the lower stages, where each rank
holds whole parameters, state beside them (such as the moving average) is cut the same way.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_ray.internals.deepspeed import full_shape, is_sharded, managed_shard


def own_shard(parameter: nn.Parameter) -> Tensor:
    """[ceil(numel / ranks)] this rank's shard, the last one padded with zeros; a view where possible."""
    return managed_shard(parameter) if is_sharded(parameter) else shard_of(parameter.detach().reshape(-1))


def shard_of(flat: Tensor) -> Tensor:
    """[ceil(numel / ranks)] this rank's shard of a flattened whole tensor, the last one padded with zeros."""
    size = -(-flat.numel() // dist.get_world_size())
    shard = flat[dist.get_rank() * size : (dist.get_rank() + 1) * size]
    return pad(shard, (0, size - shard.numel()))


def gather_parameter(parameter: nn.Parameter) -> Tensor:
    """A whole parameter gathered from all ranks' shards; a collective call with the same result on every rank."""
    return gather_shards(own_shard(parameter), full_shape(parameter))


def gather_shards(shard: Tensor, shape: torch.Size) -> Tensor:
    """The tensor of `shape` gathered from all ranks' shards; a collective call with the same result on every rank."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts)[: shape.numel()].view(shape)


def shard_parameters(module: nn.Module, config: dict[str, Any]) -> None:
    """Replace every parameter by this rank's shard of it, on its device, trained ones in float32 and frozen ones in
    their precision. A collective call; rank 0's weights are used.

    DeepSpeed can shard a whole module too, but moves it to the device first, where a model that only fits sharded
    does not fit. So layers are sharded one after another. Their weights arrive as mapped pages of files
    (`models.loading`), so a node whose ranks all load the model does not hold a copy per rank either.

    Args:
        config: DeepSpeed's configuration, of ZeRO stage 3.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    for layer in reversed(list(module.modules())):  # inner layers before outer ones
        own = [p for p in layer.parameters(recurse=False) if not is_sharded(p)]
        for parameter in own:
            # Always a copy: rank 0's broadcast would otherwise be written into mapped pages of a file.
            parameter.data = parameter.data.to(
                device, torch.float32 if parameter.requires_grad else parameter.dtype, copy=True)
        if own:
            deepspeed.zero.Init(module=layer, config_dict_or_path=config)
        for name, buffer in layer.named_buffers(recurse=False):
            setattr(layer, name, buffer.to(device))
