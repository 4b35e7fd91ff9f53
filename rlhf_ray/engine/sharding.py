"""A model's weights into the ranks' shards, one layer after another, so that no device ever holds all of it.

DeepSpeed shards a whole module as well, but moves it to the device first: a model that only fits because it is sharded
would not get that far.
"""

from typing import Any

from torch import nn


def shard(module: nn.Module, config: dict[str, Any]) -> None:
    """Leave each rank its shard of every parameter, on its device; a collective call. Rank 0's weights count.

    Args:
        config: DeepSpeed's, of ZeRO stage 3.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    for layer in reversed(list(module.modules())):  # what lies inside comes before what it lies in
        if any(True for _ in layer.parameters(recurse=False)):
            deepspeed.zero.Init(module=layer, config_dict_or_path=config)
        for name, buffer in layer.named_buffers(recurse=False):
            layer._buffers[name] = buffer.to(device)
