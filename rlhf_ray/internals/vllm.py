"""Internals of vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlhf_ray.errors import ModelError
from rlhf_ray.internals.transformers import checkpoint_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig
    from vllm import RequestOutput
    from vllm.config import VllmConfig

VERSION = "0.32.0"
ADAPTER_ID = 1
"""vLLM's number of the only adapter."""
PROCESSED = "_already_called_process_weights_after_loading"
"""See `process_weights`."""
BACKENDS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
"""Architectures of vLLM that run transformers' implementation of a model."""
TRANSFORMERS = "vllm.model_executor.models.transformers"
"""The package of their classes."""
REFERENCED = frozenset({"sinks", "w13_bias", "w2_bias"})
"""Parameters that attention and experts' kernels refer to besides the layer that has them.

Source: 0.32.0, v1/attention/backends/cpu_attn.py (`CPUAttentionBackendImpl.sinks`),
model_executor/layers/fused_moe/unquantized_fused_moe_method.py (`get_fused_moe_quant_config`).
"""


def engine_in_this_process(config: VllmConfig) -> Any:
    """An `LLMEngine` that computes in this process, whatever VLLM_ENABLE_V1_MULTIPROCESSING is.

    Source: 0.32.0, v1/engine/llm_engine.py (`LLMEngine.__init__`).
    Missing: `from_engine_args` and `from_vllm_config` obey the variable, which is on by default.
    Otherwise: generators on CPUs do not start.
    """
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)


def shut_down(engine: Any) -> None:
    """End an `LLMEngine`.

    Source: 0.32.0, v1/engine/llm_engine.py (`LLMEngine.engine_core`).
    Missing: `LLMEngine` has no method that ends it (`AsyncLLM` has).
    Otherwise: a generator that stops fails.
    """
    engine.engine_core.shutdown()


def unfinished_tokens(engine: Any) -> int:
    """Tokens that an engine of either kind has sampled for requests still in flight; 0 without an engine (None).

    Source: 0.32.0, v1/engine/output_processor.py (`OutputProcessor.request_states`), v1/engine/detokenizer.py.
    Missing: with `RequestOutputKind.FINAL_ONLY` nothing is reported before a request ends; without it every token is.
    Otherwise: a generator that makes tokens looks like one that hangs.
    """
    if engine is None:
        return 0
    states = list(engine.output_processor.request_states.values())
    return sum(s.detokenizer.num_output_tokens() for s in states if s.detokenizer is not None)


def open_requests(engine: Any) -> set[str]:
    """Ids, as they were given, of the requests that an engine of either kind has not finished.

    Source: 0.32.0, v1/engine/output_processor.py (`OutputProcessor.request_states`, `RequestState.external_req_id`).
    Missing: `get_num_unfinished_requests` says how many there are, and not which.
    Otherwise: requests that nobody waits for are neither found nor aborted before a publication.
    """
    return {state.external_req_id for state in engine.output_processor.request_states.values()}


def abort_samples(engine: Any, request_ids: Iterable[str]) -> list[RequestOutput]:
    """Abort an `LLMEngine`'s requests, and return what they sampled so far.

    Source: 0.32.0, v1/engine/output_processor.py (`external_req_ids`, `RequestState.make_request_output`).
    Missing: `LLMEngine.abort_request` returns nothing; the outputs of `AsyncLLM.abort` need its queues.
    Otherwise: partial rollouts on CPUs fail.
    """
    from vllm.v1.engine import FinishReason

    processor, outputs = engine.output_processor, []
    for request_id in request_ids:
        (inner,) = processor.external_req_ids[request_id]
        outputs.append(processor.request_states[inner].make_request_output([], None, FinishReason.ABORT, None))
    engine.abort_request([output.request_id for output in outputs])
    return outputs


@contextmanager
def restored_thread_setter() -> Iterator[None]:
    """Restore `torch.set_num_threads` afterwards, which an engine that starts replaces by a function without effect.

    Source: 0.32.0, v1/worker/cpu_worker.py (`init_device`).
    Missing: a switch.
    Otherwise: nothing, if vLLM leaves the function alone.
    """
    import torch

    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


def model_class(architecture: str) -> type[nn.Module] | None:
    """The class with which vLLM runs an architecture: its own, or one that runs transformers'; None if it lists none.

    Source: 0.32.0, model_executor/models/registry.py (`ModelRegistry.models`, `_BaseRegisteredModel.load_model_cls`).
    Missing: `ModelRegistry.resolve_model_cls` needs the configuration of an engine.
    Otherwise: generators start 6 to 12 s later.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    return None if known is None else known.load_model_cls()


@contextmanager
def unchanged_transformers_classes(architectures: Iterable[str]) -> Iterator[None]:
    """Inside, an eager engine that starts with a model of these architectures leaves transformers' classes as they are.

    To compile a model that it runs through transformers, vLLM changes the model's class for the whole process. Models
    of that class outside the engine then fail ("no attribute 'do_not_compile'").

    Source: 0.32.0, model_executor/models/transformers/base.py (`Base._decorate_cls_for_torch_compile`).
    Missing: `enforce_eager` decides whether the changed class compiles, and not whether it is changed.
    Otherwise: an engine and another model of its class cannot be in one process.
    """
    classes = [found for found in map(model_class, architectures) if found is not None]
    if classes and not any(found.__module__.startswith(TRANSFORMERS) for found in classes):
        yield
        return
    from vllm.model_executor.models.transformers.base import Base

    decorate = Base._decorate_cls_for_torch_compile
    Base._decorate_cls_for_torch_compile = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Base._decorate_cls_for_torch_compile = decorate  # type: ignore[method-assign]


def checkpoint_weights(
    config: PretrainedConfig, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of transformers' model as vLLM's model loads them from a checkpoint, some of them in several tensors.

    GPT-OSS's checkpoints have all experts of a layer in one tensor, from which vLLM copies directly into the layer
    that it computes with. That ignores its form in memory, so each expert is passed on its own.

    Source: 0.32.0, model_executor/models/gpt_oss.py (`_load_weights_other`, `_try_load_streamed_expert`).
    Missing: vLLM's weight transfer expects a trainer with the names of a checkpoint.
    Otherwise: publications of mixtures of experts fail.
    """
    for name, tensor in weights:
        parent, _, leaf = name.rpartition(".")
        if config.model_type == "gpt_oss" and parent.endswith(".experts"):
            yield from ((f"{parent}.{expert}.{leaf}", part) for expert, part in enumerate(tensor.unbind()))
        else:
            yield from checkpoint_tensors(config, name, tensor).items()


def load_checkpoint_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load tensors of a checkpoint into a model through its parameters' weight loaders, by which a reload follows.

    Two kinds are loaded without the model's `load_weights`: it copies GPT-OSS's attention sinks directly, and replaces
    the bias of a head by a new parameter when it runs transformers' implementation.

    Source: 0.32.0, model_executor/models/gpt_oss.py (`_load_weights_other`),
    model_executor/models/transformers/causal.py (`CausalMixin.load_weights`).
    Missing: weight loaders that these two use.
    Otherwise: generators keep the sinks that they started with, or fail at their first publication.
    """
    model.load_weights(_without_direct(model, weights))  # type: ignore[operator]


def _without_direct(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors other than sinks and the head's bias, which are loaded here."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    for name, tensor in weights:
        if not name.endswith((".sinks", "lm_head.bias")):
            yield name, tensor
            continue
        parameter = dict(model.named_parameters()).get(name.replace(".self_attn.", ".attn."))
        if parameter is None:
            continue  # in another stage of a pipeline
        if name.endswith(".sinks") and len(tensor) != len(parameter):
            tensor = tensor.narrow(0, get_tensor_model_parallel_rank() * len(parameter), len(parameter))
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def begin_reload(model: nn.Module) -> dict[nn.Module, Any]:
    """Let a model's `load_weights` collect new weights in checkpoint format, layer by layer.

    On CPUs experts are packed when their kernel is made, so those that are loaded need a new one.

    Source: 0.32.0, model_executor/model_loader/reload/layerwise.py, as in distributed/weight_transfer/m2n_engine.py;
    model_executor/layers/fused_moe/unquantized_fused_moe_method.py (`_setup_kernel`).
    Missing: vLLM's documentation of weight transfer leaves to each back-end how it loads.
    Otherwise: publications fail, or experts on CPUs compute with weights that are not packed.

    Returns:
        Kernels that were removed, for `finish_reload`.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    kernels = {layer: layer.quant_method.moe_kernel for layer in model.modules() if _packs_experts(layer)}
    for layer in kernels:
        layer.quant_method.moe_kernel = None
    initialize_layerwise_reload(model)
    return kernels


def finish_reload(model: nn.Module, model_config: Any, kernels: dict[nn.Module, Any]) -> None:
    """Activate the collected weights.

    On CPUs the output projection multiplies with a packed copy of its weights (`cpu_linear`). With tied embeddings the
    reload does not update that copy, and the model would silently use the old head. So it is packed again.

    Source: 0.32.0, model_executor/model_loader/reload/layerwise.py, model_executor/layers/utils.py (`cpu_linear`).
    Missing: as in `begin_reload`; the reload's list of limitations names tied parameters.
    Otherwise: publications fail, or a tied head keeps the weights of the first version.

    Args:
        kernels: what `begin_reload` returned; layers that got no weights keep theirs.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    for layer, kernel in kernels.items():
        layer.quant_method.moe_kernel = layer.quant_method.moe_kernel or kernel
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _packs_experts(layer: nn.Module) -> bool:
    """Whether a layer's experts are packed for CPUs by the kernel that computes with them."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    return kernel is not None and next(layer.parameters()).device.type == "cpu"


def load_adapter(model: nn.Module, tensors: dict[str, Tensor], rank: int) -> None:
    """Replace the adapter `ADAPTER_ID` of a model with LoRA enabled; requests that run with it continue with the new
    one.

    Args:
        tensors: A and scaled B of every adapted layer, under their names in peft's files; they are copied.

    Raises:
        ModelError: vLLM's model has no layer for one of them, and would ignore it.

    Source: 0.32.0, lora/worker_manager.py (`WorkerLoRAManager._load_adapter`), lora/model_manager.py.
    Missing: `add_lora` reads a directory in peft's format, and a request keeps the id of the adapter that it began
    with.
    Otherwise: publications of adapters fail.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager: Any = model.lora_manager
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID, {name: tensor.clone() for name, tensor in tensors.items()},
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]), device="cpu", dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper and mapper.get_rename_mapper())
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)  # which fuses the adapters of fused layers
    absent = sorted(adapter.loras.keys() - manager.modules.keys())
    if absent:
        raise ModelError(f"vLLM's {type(model).__name__} has no layer for the adapter of {absent[0]} ({len(absent)} of "
                         f"{len(adapter.loras)} are missing); name other layers in policy.lora.targets")
    manager.activate_adapter(ADAPTER_ID)


def checkpoint_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's parameters by name as meta tensors, in the form in which checkpoints are loaded into them.

    Source: 0.32.0, model_executor/model_loader/reload/layerwise.py (`restore_metadata`), reload/meta.py.
    Missing: processing replaces a layer's parameters, and only the reload remembers the former ones.
    Otherwise: publications to generators on CPUs fail.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    shapes: dict[str, Tensor] = dict(get_layerwise_info(layer).restore_metadata[0])
    own = layer.named_parameters(recurse=False, remove_duplicate=False)
    return shapes | {name: to_meta_tensor(parameter) for name, parameter in own if name not in shapes}


def empty_parameter(shape: Tensor, layer: nn.Module) -> Tensor:
    """A parameter without values from one of `checkpoint_parameters`, whose weight loader belongs to `layer`.

    Source: 0.32.0, model_executor/model_loader/reload/meta.py, reload/sanitize.py.
    Missing: vLLM makes parameters only with a layer, whose arguments nobody keeps.
    Otherwise: publications to generators on CPUs fail.
    """
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    parameter: Tensor = restore_layer_refs(materialize_meta_tensor(shape), layer)
    return parameter


def process_weights(layer: nn.Module) -> None:
    """Process a layer's loaded parameters into the form that it computes with, even if that was done before.

    Source: 0.32.0, model_executor/model_loader/reload/layerwise.py (`_layerwise_process`),
    model_executor/layers/fused_moe/unquantized_fused_moe_method.py (`_setup_kernel`, which packs experts for CPUs only
    the first time).
    Missing: the flag that prevents a second time is deleted only by the reload.
    Otherwise: a quantized layer computes with parameters in the checkpoint's form.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        packed_once = _packs_experts(layer)
        layer.__dict__.pop(PROCESSED, None)
        method.process_weights_after_loading(layer)
        if packed_once:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)  # type: ignore[attr-defined]


def derive_weights(layers: Iterable[nn.Module], changed: Collection[nn.Module]) -> None:
    """Compute again what latent attention (MLA) derives from the layers that project keys and values up.

    Source: 0.32.0, model_executor/layers/attention/mla_attention.py (`MLAAttention.process_weights_after_loading`).
    Missing: only the reload calls it a second time.
    Otherwise: models with latent attention compute with old keys and values after a publication.

    Args:
        changed: layers with new weights.
    """
    from vllm.model_executor.layers.attention import MLAAttention

    for layer in layers:
        if isinstance(layer, MLAAttention) and layer.kv_b_proj in changed:
            layer.process_weights_after_loading(layer.kv_b_proj.weight.dtype)
