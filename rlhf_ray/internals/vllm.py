"""Internals of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from vllm import RequestOutput
    from vllm.config import VllmConfig

VERSION = "0.32.0"
PROCESSED = "_already_called_process_weights_after_loading"
"""See `process_weights`."""


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


def abort_samples(engine: Any, request_ids: Iterable[str]) -> list[RequestOutput]:
    """Abort those of an `LLMEngine`'s requests that sample (and do not score), and return what they sampled so far.

    Source: 0.32.0, v1/engine/output_processor.py (`external_req_ids`, `RequestState.make_request_output`).
    Missing: `LLMEngine.abort_request` returns nothing; the outputs of `AsyncLLM.abort` need its queues.
    Otherwise: partial rollouts on CPUs fail.
    """
    from vllm.v1.engine import FinishReason

    processor, outputs = engine.output_processor, []
    for request_id in request_ids:
        (inner,) = processor.external_req_ids[request_id]
        state = processor.request_states[inner]
        if state.logprobs_processor.prompt_logprobs is None:
            outputs.append(state.make_request_output([], None, FinishReason.ABORT, None))
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


def implements(architecture: str) -> bool:
    """Whether vLLM has an implementation of its own of an architecture of config.json, without importing it.

    Source: 0.32.0, model_executor/models/registry.py (`ModelRegistry.models`, `_LazyRegisteredModel.module_name`).
    Missing: `ModelRegistry.get_supported_archs` includes those that run transformers' implementation.
    Otherwise: models that vLLM does not implement are refused late, or implemented ones at the start.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    return known is not None and not getattr(known, "module_name", "").endswith(".transformers")


def model_class(architecture: str) -> type[nn.Module]:
    """The class of an architecture that vLLM `implements`.

    Source: 0.32.0, model_executor/models/registry.py (`ModelRegistry.models`, `_BaseRegisteredModel.load_model_cls`).
    Missing: `ModelRegistry.resolve_model_cls` needs the configuration of an engine.
    Otherwise: generators do not start.
    """
    from vllm import ModelRegistry

    loaded: type[nn.Module] = ModelRegistry.models[architecture].load_model_cls()
    return loaded


def begin_reload(model: nn.Module) -> None:
    """Let a model's `load_weights` collect new weights in checkpoint format, layer by layer.

    Source: 0.32.0, model_executor/model_loader/reload/layerwise.py, as in distributed/weight_transfer/m2n_engine.py.
    Missing: vLLM's documentation of weight transfer leaves to each back-end how it loads.
    Otherwise: publications fail.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finish_reload(model: nn.Module, model_config: Any) -> None:
    """Activate the collected weights.

    On CPUs the output projection multiplies with a packed copy of its weights (`cpu_linear`). With tied embeddings the
    reload does not update that copy, and the model would silently use the old head. So it is packed again.

    Source: 0.32.0, model_executor/model_loader/reload/layerwise.py, model_executor/layers/utils.py (`cpu_linear`).
    Missing: as in `begin_reload`; the reload's list of limitations names tied parameters.
    Otherwise: publications fail, or a tied head keeps the weights of the first version.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


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

    Source: 0.32.0, model_executor/model_loader/reload/layerwise.py (`_layerwise_process`).
    Missing: the flag that prevents a second time is deleted only by the reload.
    Otherwise: a quantized layer computes with parameters in the checkpoint's form.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        layer.__dict__.pop(PROCESSED, None)
        method.process_weights_after_loading(layer)
