"""Conversion between our types and vLLM's: environment, engine arguments, sampling parameters, outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from glob import has_magic
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.adapter_publication import RANKS
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ConfigError, WorkerError
from rlhf_ray.internals.vllm import ADAPTER_ID, BACKENDS, model_class
from rlhf_ray.records import TensorEntry
from rlhf_ray.roles.engines.interface import Completion, SampleRequest

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest

    from rlhf_ray.roles.engines.interface import AdapterSettings, EngineSettings

OPEN_SERIALIZATION = "VLLM_ALLOW_INSECURE_SERIALIZATION"
WORKER_EXTENSION = "rlhf_ray.weights.object_store_backend.WorkerExtension"
FREE_AT_START = 0.01
"""Fraction of a GPU that must be free when vLLM starts with a given cache size. vLLM then does not allocate by this
fraction, but still checks it (vllm/v1/worker/utils.py, `request_memory`). Its default, 0.92, is never free if a learner
is on the same GPU."""


def refuse_open_serialization() -> None:
    """Reject a vLLM setting that unpickles messages between its processes, which lets senders run code.

    Raises:
        ConfigError: the setting is on. We send bytes and paths only, so nothing needs it.
    """
    value = os.environ.get(OPEN_SERIALIZATION, "")
    if value not in ("", "0"):
        raise ConfigError(f"the environment variable {OPEN_SERIALIZATION}={value} lets vLLM unpickle, and so run, "
                          "anything sent to its sockets; unset it (on every node), nothing here needs it")


def generator_environment(config: GenerationConfig) -> dict[str, str]:
    """Environment variables for a generator's process, to be set before torch and vLLM are imported. An existing
    `VLLM_LOGGING_LEVEL` is kept.

    Raises:
        ConfigError: as `refuse_open_serialization`.
    """
    refuse_open_serialization()
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if config.engine_kind == "async" else "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(config.threads),
    }
    if config.gpus > 0:
        if find_spec("flashinfer") is None:
            variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM's sampler imports it by default, and ends without it
        # vLLM has its own allocator where it sleeps, and opens weights by handle: segments must not grow there.
        allocator = {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "")}
        return variables | allocator | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return variables | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would put every generator of a node on the same cores
        "OMP_WAIT_POLICY": "passive",  # idle threads must not spin: roles share the cores
        "TORCH_COMPILE_DISABLE": "1",  # compiling one helper for sampled log-probabilities takes 20 s, once a start
    }


def engine_arguments(settings: EngineSettings) -> AsyncEngineArgs:
    """vLLM's arguments: token ids in and out (no tokenizer), log-probabilities of the sampling distribution."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rlhf_ray.weights.object_store_backend import backend_name

    model, generation = settings.model, settings.generation
    on_cpu = generation.gpus == 0
    arguments: dict[str, Any] = dict(
        model=path_for_vllm(model.path),
        **model.trust,
        load_format="safetensors",
        dtype=model.dtype,
        skip_tokenizer_init=True,
        generation_config="vllm",  # a model's own sampling defaults would change the distribution
        max_model_len=settings.max_context,
        max_num_seqs=generation.max_sequences,
        max_num_batched_tokens=generation.prefill_tokens(settings.max_context),
        scheduling_policy="priority",  # requests that score a prompt do not wait behind all others
        # vLLM 0.32 takes back the random numbers of a divided request by its generator's offset, which generators of
        # CPUs do not have (v1/worker/gpu_model_runner.py, `_bookkeeping_sync`).
        enable_chunked_prefill=False if on_cpu else None,
        seed=settings.seed,
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,  # as many as a request asks for
        enforce_eager=on_cpu,
        enable_prefix_caching=not on_cpu,  # prompts on CPUs are shorter than a cache block (128 tokens)
        worker_extension_cls=WORKER_EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend=backend_name(settings.transport, generation.gpus)),
        enable_sleep_mode=generation.sleep_level > 0,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **_memory(generation),
        **_parallelism(generation),
        **_adapters(settings.adapters),
        **_head(model),
    )
    arguments = arguments | generation.vllm
    if operators := _operators(settings):
        arguments["compilation_config"] = {**arguments.get("compilation_config", {}), **operators}
    return AsyncEngineArgs(**arguments)


def path_for_vllm(path: str) -> str:
    """A model's path, or that of a link to it for the rest of the process: vLLM takes a directory for a pattern of
    `glob`, and in one with brackets finds no weights (vllm/model_executor/model_loader/default_loader.py)."""
    if not has_magic(path) or not Path(path).is_dir():
        return path
    return str(Path(_folder_with_link(str(Path(path).resolve())).name) / "model")


@cache
def _folder_with_link(path: str) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="rlhf-ray-model-", ignore_cleanup_errors=True)
    (Path(folder.name) / "model").symlink_to(path, target_is_directory=True)
    return folder


def _memory(generation: GenerationConfig) -> dict[str, Any]:
    if generation.cache_mb is None:
        return {"gpu_memory_utilization": generation.gpu_memory_utilization}
    return {"kv_cache_memory_bytes": generation.cache_mb << 20, "gpu_memory_utilization": FREE_AT_START}


def _operators(settings: EngineSettings) -> dict[str, Any]:
    """Entries of `compilation_config` that select torch's own rotary embedding for latent attention on CPUs: the kernel
    of vLLM 0.32 assumes that queries and keys are contiguous, which they are not there, and rotates wrong values."""
    if settings.generation.gpus or not any(name.startswith("Deepseek") for name in settings.architectures):
        return {}
    return {"custom_ops": ["-rotary_embedding"]}


def _parallelism(generation: GenerationConfig) -> dict[str, Any]:
    if generation.engine_kind == "in_process":
        # Steps must not overlap: weights change between two of them.
        return {"async_scheduling": False}
    if generation.devices == 1:
        return {}
    # Child processes of the worker, on the GPUs of its one bundle. vLLM's Ray executor would start actors in other
    # bundles, outside our placement, deadlines and restarts; its advantage, engines over several nodes, costs network
    # bandwidth in every layer.
    return {"tensor_parallel_size": generation.tensor_parallel, "pipeline_parallel_size": generation.pipeline_parallel,
            "distributed_executor_backend": "mp"}


def _adapters(adapters: AdapterSettings | None) -> dict[str, Any]:
    """Engine arguments for one adapter, on the layers that it has only."""
    if adapters is None:
        return {}
    from rlhf_ray.models.lora import layer_in_file  # imports torch, which reads `generator_environment`
    from rlhf_ray.models.lora_targets import last_names

    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(rank for rank in RANKS if rank >= adapters.rank),
            "lora_target_modules": last_names(map(layer_in_file, adapters.shapes))}


def _head(model: ModelConfig) -> dict[str, Any]:
    """Engine arguments for logits in float32. vLLM's `LogitsProcessor` reads the entry of config.json, in both model
    runners and for adapters on the head, and converts the weight that it has at each pass, so publications do not
    matter to it (vllm/config/model.py, `head_dtype`)."""
    return {"hf_overrides": {"head_dtype": "float32"}} if model.float32_head else {}


def adapter_request(settings: EngineSettings) -> LoRARequest | None:
    """The adapter with which every request runs. It has the same name in all versions: a publication replaces its
    tensors, so requests in flight continue with the new ones, as they do with new weights."""
    from vllm.lora.request import LoRARequest

    if settings.adapters is None:
        return None
    return LoRARequest("policy", ADAPTER_ID, "/no/file: publications load its tensors")


def adapters_of_zeros(adapters: AdapterSettings) -> Iterator[tuple[TensorEntry, NDArray[np.uint8]]]:
    """The tensors with which the model is its base, as a publication would contain them."""
    for name, shape in adapters.shapes.items():
        entry = TensorEntry(name, "float32", shape, 4 * prod(shape))
        yield entry, np.zeros(entry.nbytes, np.uint8)


def inspect_architectures(settings: EngineSettings) -> None:
    """Register the model's class with vLLM's registry from this process.

    Otherwise the first engine on a machine starts a Python process just to inspect the class (6-12 s). That process
    keeps CUDA uninitialised here, so on GPUs this is left to vLLM.
    """
    from vllm import ModelRegistry

    from rlhf_ray.weights.object_store_backend import register_corrected_models

    register_corrected_models()
    if settings.generation.gpus > 0:
        return
    classes = {name: model_class(name) for name in settings.architectures}
    if not any(classes.values()):
        classes = {name: model_class(name) for name in BACKENDS}
    for name, found in classes.items():
        if found is not None:
            ModelRegistry.register_model(name, found)


def sampling_parameters(request: SampleRequest) -> SamplingParams:
    """Parameters that sample one response and return it with its log-probabilities, all at the end; with stop strings,
    the response so far after every token."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    return SamplingParams(
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=request.seed,
        stop_token_ids=list(request.stop_tokens),
        logprobs=request.top_logprobs,
        prompt_logprobs=0 if request.scores_prompt else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def prompt_of(tokens: list[int]) -> Any:
    """vLLM's rendered input for token ids."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(tokens)


def completion_of(output: RequestOutput) -> Completion:
    """The finished response in `output`.

    Raises:
        WorkerError: vLLM left out log-probabilities or weight versions.
    """
    drawn: Any = output.outputs[0]
    tokens = np.asarray(drawn.token_ids, dtype=np.int32)
    values, listed = _listed_logprobs(drawn.logprobs, len(tokens), output.request_id)
    versions = np.full(len(tokens), -1, dtype=np.int32)
    for span in drawn.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise WorkerError(f"vLLM returned no weight version for some of {len(tokens)} tokens of "
                          f"{output.request_id}; use the pinned version of vLLM")
    masks = () if values.shape[1] == 1 else tuple(
        row[kept] for row, kept in zip(listed[:, 1:], np.isfinite(values[:, 1:]), strict=True))
    return Completion(tokens, values[:, 0], versions, str(drawn.finish_reason), masks, _prompt_logprobs(output))


def _prompt_logprobs(output: RequestOutput) -> NDArray[np.float32] | None:
    """`[L]` log-probabilities of the prompt's tokens, if they were requested and the request was not aborted before."""
    flat: Any = output.prompt_logprobs
    if flat is None or not output.outputs[0].token_ids:
        return None
    values, _ = _listed_logprobs(flat, len(output.prompt_token_ids or ()) - 1, output.request_id)
    return np.concatenate([[0.0], values[:, 0]]).astype(np.float32)


def _listed_logprobs(
    flat: FlatLogprobs | None, count: int, request_id: str
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """`[count, 1 + k]` log-probabilities and tokens at `count` positions: the sampled one, then the k most likely."""
    returned = 0 if flat is None else len(flat.logprobs)
    if flat is None or (returned % count if count else returned) or returned < count:
        raise WorkerError(f"vLLM returned {returned} log-probabilities for {count} tokens of {request_id}; use the "
                          "pinned version of vLLM")
    shape = count, returned // count if count else 1
    return (np.asarray(flat.logprobs, dtype=np.float32).reshape(shape),
            np.asarray(flat.token_ids, dtype=np.int32).reshape(shape))
