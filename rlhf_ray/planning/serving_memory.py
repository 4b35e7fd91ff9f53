"""Memory of roles that do not train: generators with vLLM, and frozen models that score."""

from math import isfinite

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.planning.activations import Pass, logits_bytes, scoring_bytes
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.worker_memory import (
    ACTIVATIONS,
    BUFFERS,
    CACHE,
    ENGINE_CORE,
    GENERATOR,
    GPU_CONTEXT,
    GPU_HOST,
    LOGITS,
    MIB,
    RUNTIME,
    SCORER,
    WEIGHTS,
    Memory,
)


def is_async(config: GenerationConfig) -> bool:
    """Whether vLLM runs in processes of its own (roles/engines/vllm_adapter.py, `engine_kind`)."""
    return config.engine == "async" or (config.engine == "auto" and (config.gpus > 0 or config.devices > 1))


def generator_memory(
    config: GenerationConfig, shape: ModelShape, longest: int, device: Hardware, bucket_bytes: float,
    through_memory: float = 0.0,
) -> Memory:
    """One generator's. On the CPU it holds its weights twice more while a publication arrives, as they came and as they
    are packed for its kernels (weights/double_buffer.py); on a GPU vLLM takes what `kv_cache_mb` and the weights
    need, or `gpu_memory_utilization` of the device; where a node has no GPU, a cache for all sequences is counted.

    Args:
        longest: tokens of prompt and response.
        bucket_bytes: of a publication; its largest.
        through_memory: bytes of a publication that a GPU's engine maps in main memory before it loads them.
    """
    if not config.gpus:
        return _on_cpu(config, shape)
    spans = config.devices
    weights = shape.weight_bytes / spans
    a_pass = Pass(config.prefill_tokens(longest), longest, on_gpu=True, half_model=shape.bytes_per_value == 2)
    parts = {WEIGHTS: weights, ACTIVATIONS: scoring_bytes(shape, a_pass) / spans,
             LOGITS: 2 * config.max_sequences * shape.vocabulary * 4.0, BUFFERS: bucket_bytes, RUNTIME: GPU_CONTEXT}
    taken = device.memory_bytes * config.gpu_memory_utilization if config.cache_mb is None else 0.0
    if config.cache_mb is not None:
        parts[CACHE] = config.cache_mb * float(MIB)
    elif isfinite(taken):
        parts[CACHE] = max(0.0, taken - sum(parts.values()))
    else:  # no GPU to take a share of
        parts[CACHE] = config.max_sequences * shape.cache_bytes * longest / spans
    fixed = taken if isfinite(taken) else 0.0
    host = {BUFFERS: through_memory, RUNTIME: GENERATOR + spans * (ENGINE_CORE + GPU_HOST)}
    return Memory(device=parts, host=host, fixed=fixed)


def _on_cpu(config: GenerationConfig, shape: ModelShape) -> Memory:
    head = shape.vocabulary * shape.hidden * shape.bytes_per_value if shape.tied else 0
    return Memory(host={
        WEIGHTS: shape.weight_bytes + head,
        BUFFERS: 2 * (shape.weight_bytes + head),
        CACHE: (config.cache_mb or 0) * MIB,
        RUNTIME: GENERATOR + (ENGINE_CORE if is_async(config) else 0),
    })


def cache_sequences(config: GenerationConfig, shape: ModelShape, memory: Memory, longest: int) -> float:
    """Sequences of the longest kind that the KV cache has room for at a time."""
    spans = config.devices if config.gpus else 1
    return memory.shown[CACHE] * spans / (shape.cache_bytes * longest)


def scorer_memory(gpus: float, shape: ModelShape, micro_batch_tokens: int, longest: int, answers: float) -> Memory:
    """A frozen model's that scores: its weights, and a pass without gradients.

    Args:
        answers: share of the tokens whose log-probability is asked for; 0 with a scalar head.
    """
    on_gpu = gpus > 0
    a_pass = Pass(micro_batch_tokens, longest, on_gpu, half_model=shape.bytes_per_value == 2)
    parts = {
        WEIGHTS: float(shape.weight_bytes),
        ACTIVATIONS: scoring_bytes(shape, a_pass),
        LOGITS: logits_bytes(shape, a_pass, round(answers * micro_batch_tokens), training=False),
    }
    if not on_gpu:
        # Weights in the files' precision are read where they lie, mapped; of others there are the files' pages as well.
        converted = shape.saved_bytes not in (None, shape.bytes_per_value)
        mapped = shape.parameters * float(shape.saved_bytes or 0) if converted else 0.0
        return Memory(host={**parts, BUFFERS: mapped, RUNTIME: SCORER})
    return Memory(device={**parts, RUNTIME: GPU_CONTEXT}, host={RUNTIME: SCORER + GPU_HOST})
