"""A model's weights into the ranks' shards, one layer after another, so that no rank ever holds all of it.

DeepSpeed shards a whole module as well, but moves it to the device first: a model that only fits because it is sharded
would not get that far. Nor would a node whose ranks each hold the whole model in main memory before it is sharded: so
layers come as mapped pages of files (`models.loading`), and are copied, and cast, when it is their turn.
"""

from typing import Any

import torch
from torch import nn


def shard(module: nn.Module, config: dict[str, Any]) -> None:
    """Leave each rank its shard of every parameter, on its device, those under training in float32; a collective call.
    Rank 0's weights count.

    Args:
        config: DeepSpeed's, of ZeRO stage 3.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    for layer in reversed(list(module.modules())):  # what lies inside comes before what it lies in
        own = [p for p in layer.parameters(recurse=False) if not hasattr(p, "ds_id")]
        for parameter in own:
            # A copy even where nothing changes: what other ranks send would be written into this one's pages of a file.
            parameter.data = parameter.data.to(
                device, torch.float32 if parameter.requires_grad else parameter.dtype, copy=True)
        if own:
            deepspeed.zero.Init(module=layer, config_dict_or_path=config)
        for name, buffer in layer.named_buffers(recurse=False):
            layer._buffers[name] = buffer.to(device)
