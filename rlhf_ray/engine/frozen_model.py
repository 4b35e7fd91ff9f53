"""Frozen models that score, sharded over the ranks of a worker: ZeRO-3 without an optimizer.

A rank gathers each layer from all ranks when a pass comes to it, and frees it afterwards (Rajbhandari et al. 2020,
section 5.3). So every pass is a collective call, and the process group must be joined before a model is sharded.
"""

from collections.abc import Callable

from torch import nn

from rlhf_ray.engine import distributed
from rlhf_ray.engine.parameter_shards import shard_parameters
from rlhf_ray.internals.transformers import layers_of
from rlhf_ray.models.shard import Place, Shard, place_whole

ZERO_3 = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9,
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
"""DeepSpeed's configuration. Below the threshold parameters would be whole on every rank."""


def place_of(shard: Shard) -> Place:
    """Puts a module on this process's device: whole, or the process's shard of every parameter (a collective call;
    rank 0's weights are used)."""
    return place_whole if shard.is_whole else _place_shard


def largest_of(shard: Shard) -> Callable[[list[float]], list[float]] | None:
    """Element-wise maximum over the ranks of a model; None for a whole one. See `ParityProbe`."""
    return None if shard.is_whole else distributed.largest_of_ranks


def _place_shard(module: nn.Module) -> str:
    import deepspeed
    from deepspeed.utils import set_z3_leaf_module

    module.eval().requires_grad_(False)
    shard_parameters(module, ZERO_3)
    for layer in layers_of(module):  # is gathered in one call, and not each module in it
        set_z3_leaf_module(layer, True)
    engine, *_ = deepspeed.initialize(model=module, config=ZERO_3, dist_init_required=False)
    module.eval()
    return str(engine.device)
