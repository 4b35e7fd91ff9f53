"""Memory of roles that do not train: vLLM generators, and frozen models that score."""

from dataclasses import dataclass
from math import isfinite

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.stages import ScorerConfig
from rlhf_ray.planning.activations import MicroBatch, logits_bytes, scoring_bytes
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.memory_breakdown import (
    ACTIVATIONS,
    BUFFERS,
    CACHE,
    ENGINE_CORE,
    GATHERED,
    GENERATOR,
    GPU_CONTEXT,
    GPU_HOST,
    LEARNER,
    LOGITS,
    MIB,
    RUNTIME,
    SCORER,
    WEIGHTS,
    Memory,
    peak_of,
)
from rlhf_ray.planning.model_shape import ModelShape


@dataclass(frozen=True)
class GeneratorAdapters:
    """Adapters that a generator computes with."""

    rank: int
    """0 without adapters."""
    nbytes: float

    def held_bytes(self, tokens: int, shape: ModelShape) -> float:
        """Bytes on the CPU: the adapters as received, as vLLM keeps them and as it computes with them; and of the
        widest layer a copy of B for each token (vllm/lora/ops/torch_ops/lora_ops.py, `bgmv_expand`)."""
        return 3 * self.nbytes + tokens * shape.intermediate * self.rank * float(shape.bytes_per_value)


WITHOUT_ADAPTERS = GeneratorAdapters(0, 0.0)


def generator_memory(
    config: GenerationConfig, shape: ModelShape, longest: int, device: Hardware, bucket_bytes: float,
    through_memory: float = 0.0, adapters: GeneratorAdapters = WITHOUT_ADAPTERS, float32_head: bool = False,
) -> Memory:
    """Memory of one generator.

    On the CPU it holds its weights twice more while a publication arrives: as received, and as packed for its
    kernels (weights/double_buffer.py), unless adapters arrive in their place. On a GPU vLLM takes what
    `kv_cache_mb` and the weights need, or `gpu_memory_utilization` of the device. If the node has no GPU, a cache
    for all sequences is counted.

    Args:
        longest: tokens of prompt and response.
        bucket_bytes: buckets of a publication that are on the GPU at a time.
        through_memory: bytes of a publication that a GPU's engine maps in main memory before it loads them.
        float32_head: as in `MicroBatch`.
    """
    if not config.gpus:
        return _on_cpu(config, shape, adapters, longest, float32_head)
    spans = config.devices
    weights = shape.weight_bytes / spans
    parts = {WEIGHTS: weights, **_of_a_pass(config, shape, longest), BUFFERS: bucket_bytes, RUNTIME: GPU_CONTEXT}
    taken = device.memory_bytes * config.gpu_memory_utilization if config.cache_mb is None else 0.0
    if config.cache_mb is not None:
        parts[CACHE] = config.cache_mb * float(MIB)
    elif isfinite(taken):
        parts[CACHE] = max(0.0, taken - sum(parts.values()))
    else:  # the node has no GPU
        parts[CACHE] = config.max_sequences * shape.cache_bytes * longest / spans
    host = {BUFFERS: through_memory, RUNTIME: GENERATOR + spans * (ENGINE_CORE + GPU_HOST)}
    return Memory(device=parts, host=host)


def _of_a_pass(
    config: GenerationConfig, shape: ModelShape, longest: int, float32_head: bool = False
) -> dict[str, float]:
    """A prefill's activations, of one GPU or of all processes on CPUs, and the logits of all sequences with a copy."""
    micro_batch = MicroBatch(config.prefill_tokens(longest), longest, on_gpu=bool(config.gpus),
                             half_model=shape.bytes_per_value == 2, float32_head=float32_head)
    converted = shape.hidden if micro_batch.converts_head else 0
    return {ACTIVATIONS: scoring_bytes(shape, micro_batch) / (config.devices if config.gpus else 1),
            LOGITS: (2 * config.max_sequences + converted) * shape.vocabulary * 4.0}


def _on_cpu(config: GenerationConfig, shape: ModelShape, adapters: GeneratorAdapters, longest: int,
            float32_head: bool) -> Memory:
    head = shape.vocabulary * shape.hidden * shape.bytes_per_value if shape.tied else 0
    received = 2.0 * (shape.weight_bytes + head)
    if adapters.rank:
        received = adapters.held_bytes(config.prefill_tokens(longest), shape)
    return Memory(host={
        WEIGHTS: shape.weight_bytes + head,
        **_of_a_pass(config, shape, longest, float32_head),
        BUFFERS: received,
        CACHE: (config.cache_mb or 0) * MIB,
        RUNTIME: GENERATOR + (ENGINE_CORE if config.engine_kind == "async" else 0),
    })


def cache_sequences(config: GenerationConfig, shape: ModelShape, memory: Memory, longest: int) -> float:
    """Sequences of maximum length that fit into the KV cache at the same time."""
    spans = config.devices if config.gpus else 1
    return memory.shown[CACHE] * spans / (shape.cache_bytes * longest)


def scorer_memory(
    config: ScorerConfig, shape: ModelShape, samples: int, longest: int, answers: float, logit_copies: int = 1,
    float32_head: bool = False,
) -> Memory:
    """Memory of a rank with a frozen model that scores: its weights or its shard of them, and a pass without gradients.

    A sharded model also has the layers that DeepSpeed leaves gathered, and one as it arrives from all ranks. It is
    loaded before it is sharded: weights in the files' precision are mapped pages, which the ranks of a node share,
    others a copy in each rank.

    Args:
        samples: most samples of a call, which the ranks of a model divide.
        answers: share of the tokens whose log-probability is computed; 0 with a scalar head.
        logit_copies: as in `logits_bytes`.
        float32_head: as in `MicroBatch`.
    """
    on_gpu, sharded = config.gpus > 0, config.shards > 1
    micro_batch_tokens = min(config.micro_batch_tokens, -(-samples // config.shards) * longest)
    micro_batch = MicroBatch(micro_batch_tokens, longest, on_gpu, half_model=shape.bytes_per_value == 2,
                             float32_head=float32_head)
    parts = {
        WEIGHTS: shape.weight_bytes / config.shards,
        ACTIVATIONS: scoring_bytes(shape, micro_batch),
        LOGITS: logits_bytes(shape, micro_batch, round(answers * micro_batch_tokens), copies=logit_copies),
    }
    # Weights in the files' precision are memory-mapped; others are converted, so the files' pages count as well.
    converted = shape.saved_bytes not in (None, shape.bytes_per_value)
    mapped = shape.parameters * float(shape.saved_bytes or 0) if converted else 0.0
    if not sharded:
        if not on_gpu:
            return Memory(host={**parts, BUFFERS: mapped, RUNTIME: SCORER})
        return Memory(device={**parts, RUNTIME: GPU_CONTEXT}, host={RUNTIME: SCORER + GPU_HOST})
    parts[BUFFERS] = (min(GATHERED, shape.parameters) + shape.layer_parameters) * float(shape.bytes_per_value)
    loading = {WEIGHTS: float(shape.weight_bytes) if converted else shape.weight_bytes / config.shards, BUFFERS: mapped}
    if on_gpu:
        return Memory(device={**parts, RUNTIME: GPU_CONTEXT}, host={**loading, RUNTIME: LEARNER + GPU_HOST})
    return Memory(host=peak_of({**parts, RUNTIME: LEARNER}, {**loading, RUNTIME: LEARNER}))
