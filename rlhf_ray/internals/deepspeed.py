"""Internals of DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VERSION = "0.19.8"


class Fragment(NamedTuple):
    """The part of a parameter in this rank's partition of the optimizer."""

    start: int
    """Where it begins in the flattened parameter."""
    weights: Tensor
    """[length] float32 weights that the optimizer updates; a view."""
    owner: Tensor
    """The optimizer's key for its state: the flat tensor of a parameter group."""
    offset: int
    """Where the part begins in `owner`."""


def wrapped_optimizer(engine: Any, stage: int) -> torch.optim.Optimizer:
    """The optimizer that was given to `deepspeed.initialize`.

    Source: 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py (`self.optimizer = init_optimizer`).
    Missing: `initialize` returns the wrapper; one's own reference is an object whose parameter groups it has replaced.
    Otherwise: learners fail when they save, load or offload their state.
    """
    optimizer: torch.optim.Optimizer = engine.optimizer.optimizer if stage else engine.optimizer
    return optimizer


def partitioned_fragment(parameter: Any, optimizer: Any) -> Fragment | None:
    """Under ZeRO stages 1 and 2; None if the parameter is in other ranks' partitions.

    Source: 0.19.8, utils/mixed_precision_linkage.py (`_hp_mapping`), utils/tensor_fragment.py, runtime/zero/
    stage_1_and_2.py (`single_partition_of_fp32_groups`).
    Missing: `safe_get_full_fp32_param` and its like gather whole tensors on every rank, and give no optimizer state
    before the first step, when it must be created to be restored.
    Otherwise: learners fail when they save or load their state.
    """
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    owner = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    return Fragment(mapping.lp_fragment_address.start, mapping.hp_fragment.data, owner,
                    mapping.hp_fragment_address.start)


def sharded_fragment(parameter: Any, optimizer: Any, rank: int) -> Fragment:
    """Under ZeRO stage 3; empty if the shard is padding only.

    Source: 0.19.8, runtime/zero/stage3.py (`grad_position`, `get_param_id`, `fp32_partitioned_groups_flat`).
    Missing: `safe_get_local_fp32_param` does not say where the shard is in the optimizer's flat tensors, and
    `safe_get_local_optimizer_state` gives nothing before the first step.
    Otherwise: learners fail when they save or load their state.
    """
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = rank * size
    length = max(0, min(size, parameter.ds_numel - start))  # the last shards may be padded
    owner = optimizer.fp32_partitioned_groups_flat[group]
    return Fragment(start, owner.data.narrow(0, offset, length), owner, offset)


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether ZeRO stage 3 manages a parameter.

    Source: 0.19.8, runtime/zero/partition_parameters.py (`ds_id`; so do `ds_shape`, `ds_numel` and `ds_tensor` below).
    Missing: DeepSpeed's documentation has users test for this attribute, but describes it nowhere.
    Otherwise: learners under stage 3 fail at their start.
    """
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> torch.Size:
    """Shape of a whole parameter, even if this rank holds only a shard of it.

    Source: 0.19.8, runtime/zero/partition_parameters.py (`ds_shape`).
    Missing: the shape without gathering the parameter.
    Otherwise: learners under stage 3 fail at their start.
    """
    return torch.Size(parameter.ds_shape if is_sharded(parameter) else parameter.shape)


def managed_shard(parameter: Any) -> Tensor:
    """[ceil(numel / ranks)] this rank's shard of a parameter that `is_sharded`, in the model's precision; a view.

    Source: 0.19.8, runtime/zero/partition_parameters.py (`ds_tensor`).
    Missing: `safe_get_local_fp32_param` gives the optimizer's weights, not those that passes gather, and none if the
    parameter is frozen.
    Otherwise: under stage 3 the moving average and restored weights fail.
    """
    return parameter.ds_tensor.detach().view(-1)  # type: ignore[no-any-return]


def release_gathered(engine: Any) -> None:
    """Under ZeRO stage 3, free the gathered parameters of passes without a backward pass.

    Source: 0.19.8, runtime/zero/parameter_offload.py (`partition_all_parameters`).
    Missing: only the engine's `step` frees them.
    Otherwise: scoring under stage 3 fails.
    """
    engine.optimizer.parameter_offload.partition_all_parameters()


def gather_together(engine: Any, layers: Iterable[nn.Module]) -> None:
    """Under ZeRO stage 3, gather all parameters of a layer when a pass comes to it, and free them together, instead of
    those of each module in it.

    Source: 0.19.8, runtime/zero/parameter_offload.py (`_register_deepspeed_module`, `setup_zero_stage3_hooks`).
    Missing: layers that are marked by `set_z3_leaf_modules` before `initialize` are gathered as wholes too, but their
    gradients are then kept until a backward hook of the layer reduces them. It runs before there are any where the
    layer's input has no gradient, as that of the first layer under adapters, and in backward passes that only compute
    gradients of some tensors. `stage3_module_granularity_threshold` compares averages, by which a whole backbone can be
    one unit.
    Otherwise: passes under stage 3 take longer.
    """
    from deepspeed.utils import set_z3_leaf_module

    offload = engine.optimizer.parameter_offload
    offload.destroy()
    for layer in layers:
        set_z3_leaf_module(layer, True)
    offload.setup_zero_stage3_hooks()


def mark_no_experts() -> None:
    """Under ZeRO stage 3, treat the experts of mixtures as other modules. DeepSpeed marks those of some families to be
    gathered as wholes, with the effects on gradients that `gather_together` names.

    Source: 0.19.8, runtime/zero/leaf_module_config.py (`DEFAULT_LEAF_MODULE_CLASSES`).
    Missing: an empty list in `zero_optimization.leaf_module` has this effect, and logs a warning in every run.
    Otherwise: learners of `mixtral`, `qwen2_moe` and `qwen3_moe` fail before they start, when passes are compared.
    """
    from deepspeed.runtime.zero import leaf_module_config

    leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES.clear()


def autocast(engine: Any) -> AbstractContextManager[None]:
    """The autocast that the engine's forward pass uses.

    Source: 0.19.8, runtime/torch_autocast.py (`autocast_if_enabled`).
    Missing: a forward pass of the engine whose graph accumulates no gradients in it.
    Otherwise: learners fail when they compare packed passes with transformers' own, before they start.
    """
    from deepspeed.runtime.torch_autocast import autocast_if_enabled

    context: AbstractContextManager[None] = autocast_if_enabled(engine)
    return context


def leave_gradients_unreduced(engine: Any) -> None:
    """At stage 0, let the backward pass copy no gradients into buckets to sum them over ranks.

    Source: 0.19.8, runtime/engine.py (`enable_backward_allreduce`).
    Missing: a setting; `no_sync` has further effects, on the count of accumulated gradients.
    Otherwise: a single rank's update takes longer.
    """
    engine.enable_backward_allreduce = False


def drop_gradients(engine: Any, stage: int) -> None:
    """Drop the gradients of all backward passes since the last step, as the engine's `step` drops those that overflow.

    Source: 0.19.8, runtime/zero/stage_1_and_2.py (`step`, the branch of an overflow), stage3.py (`_pre_step`,
    `_overflow_clean_up`), runtime/engine.py (`zero_grad`).
    Missing: `engine.zero_grad` drops what the parameters' `grad` holds. Stages 2 and 3 accumulate gradients in buffers
    of their own, and only a `step` empties these.
    Otherwise: the gradients of an optimizer step that is left out (`algorithm.target_kl`) add to those of the next one.
    """
    optimizer = engine.optimizer
    if stage == 0:
        engine.zero_grad()
    elif stage == 3:
        optimizer._pre_step()
        optimizer._overflow_clean_up(optimizer.loss_scale)
        release_gathered(engine)
    else:
        optimizer.micro_step_id = -1
        optimizer.zero_grad()
        optimizer._release_preflattened_grad_buffers()
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
        for group in optimizer.all_grad_tensors:
            optimizer.all_grad_tensors[group] = None
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
            optimizer.reset_cpu_buffers()


def offload_optimizer(optimizer: torch.optim.Optimizer, pin: bool) -> None:
    """Move an optimizer's state to main memory, into pinned pages with `pin`.

    Source: 0.19.8, runtime/zero/offload_states.py.
    Missing: `engine.offload_states` fails at stage 0.
    Otherwise: learners that share a GPU with generators fail after their first update.
    """
    from deepspeed.runtime.zero.offload_states import offload_optimizer_states

    offload_optimizer_states(optimizer, "cpu", pin_memory=pin)


def reload_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimizer's state back to `device`. Source, what is missing, and otherwise: as `offload_optimizer`."""
    from deepspeed.runtime.zero.offload_states import reload_optimizer_states

    reload_optimizer_states(optimizer, device)


def skip_shared_memory_kernel() -> None:
    """Keep the first `init_distributed` on a CPU from compiling a kernel for 30-50 s, which gloo does not use.

    Source: 0.19.8, ops/__init__.py (`__compatible_ops__`), comm/torch.py (`build_shm_op`).
    Missing: DS_BUILD_SHM_COMM=0 affects only DeepSpeed's installation.
    Otherwise: learners on CPUs start later, or not at all where there is no compiler.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer without compilation. DeepSpeed checks whether our optimizer is a Muon, and
    that import alone, whose functions are marked for compilation, loads all of torch's compiler: a third of a
    learner's start-up time.

    Source: 0.19.8, runtime/zero/muon/original_muon.py (`@compiler.compile()`), runtime/compiler.py.
    Missing: a switch; TORCH_COMPILE_DISABLE loads the compiler too.
    Otherwise: learners start later.
    """
    from deepspeed.runtime import compiler

    original = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = original
