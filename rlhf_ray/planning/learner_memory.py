"""Memory of one rank under training: DeepSpeed's shards at each ZeRO stage, activations, checkpoint copies."""

from dataclasses import dataclass

from rlhf_ray.config.learner import SHARDED_BUCKET, LearnerConfig, PPOLearnerConfig
from rlhf_ray.planning.activations import (
    FLOAT,
    HALF,
    MicroBatch,
    head_bytes,
    logits_bytes,
    scoring_bytes,
    training_bytes,
    transient_bytes,
)
from rlhf_ray.planning.memory_breakdown import (
    ACTIVATIONS,
    ADAPTERS,
    BUFFERS,
    COPIES,
    COPIES_ON_CPU,
    GATHERED,
    GPU_CONTEXT,
    GPU_HOST,
    GRADIENTS,
    LEARNER,
    LOGITS,
    OPTIMIZER,
    REDUCE_BUCKET,
    RUNTIME,
    WEIGHTS,
    Memory,
    peak_of,
)
from rlhf_ray.planning.model_shape import ModelShape

MOMENTS = 2
"""Numbers that AdamW keeps per weight."""


@dataclass(frozen=True)
class Training:
    """A model under training, and the batches that pass through it."""

    shape: ModelShape
    """Shape in the model's own precision (`bytes_per_value`), in which it is published."""
    longest: int
    """Tokens of its longest row."""
    answers: float
    """Share of a micro-batch's tokens whose log-probability is computed; 0 with a scalar head."""
    rows: int
    """Rows of one optimizer step, over all ranks; a micro-batch holds no more than a rank's share of them."""
    average: bool = False
    """Whether a moving average of the weights is kept (`policy.ema_decay`)."""
    bucket_bytes: float = 0.0
    """Largest bucket of a publication; 0 for a model that is not published."""
    direct: bool = False
    """Whether weights are published from GPU to GPU, not through main memory (`weights.transport`)."""
    logit_copies: int = 1
    logit_gradients: int = 1
    """As in `logits_bytes`."""
    float32_head: bool = False
    """As in `MicroBatch`."""


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Weights of adapters on every linear layer (Hu et al. 2021): rank x (inputs + outputs) each. Routed experts are
    not linear layers in transformers, and have none."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    dense = (shape.layers - shape.expert_layers) * shape.matrices * (shape.hidden + shape.intermediate)
    shared = shape.expert_layers * shape.matrices * (shape.hidden + shape.shared_intermediate)
    return rank * (shape.layers * attention + dense + (shared if shape.shared_intermediate else 0))


def learner_memory(config: LearnerConfig, model: Training) -> Memory:
    """Peak memory of one rank: in a backward pass or, on the CPU, while a checkpoint is copied."""
    on_gpu, world, number = config.gpus > 0, config.workers, trained(config, model.shape)
    state = _state(config, model.shape)
    average = FLOAT * number / world if model.average else 0.0
    buffers = {BUFFERS: _communication_bytes(config, model.shape) + average}
    sharded = stage_of(config) == 3
    copies = {COPIES: (1 + MOMENTS + model.average) * FLOAT * number / world}
    if not on_gpu:
        process = {RUNTIME: float(LEARNER + (ADAPTERS if config.lora else 0))}
        learning = [{**moment, **buffers, **process} for moment in _update(config, model, state)]
        # Stage 3 frees its buffers except those of gradients; at lower stages the C library keeps freed memory
        # (workers/actor_class.py).
        between = {BUFFERS: average + _bucket_bytes(config, model.shape)} if sharded else {**buffers, GRADIENTS: 0.0}
        return Memory(host=peak_of(*learning, {**state, **copies, **between, **process}))
    moved: dict[str, float] = {}
    if config.offload_optimizer:  # the moments move with the copy of the weights and gradients of the same size
        copied = _copied(config, model.shape)
        moved = {OPTIMIZER: state.pop(OPTIMIZER), WEIGHTS: copied, GRADIENTS: copied}
        state[WEIGHTS] -= copied
    elif isinstance(config, PPOLearnerConfig) and config.offload_between_phases:
        moved = {OPTIMIZER: state[OPTIMIZER]}
    if model.direct:  # two are kept for generators, or one and the copy that NCCL sends, while the next is gathered
        buffers[BUFFERS] += 3 * model.bucket_bytes
    kept = {name: amount for name, amount in state.items() if name not in (GRADIENTS, OPTIMIZER if moved else "")}
    scoring = {**kept, **_pass_without_gradients(config, model), **buffers, RUNTIME: GPU_CONTEXT}
    learning = [{**moment, **buffers, RUNTIME: GPU_CONTEXT} for moment in _update(config, model, state)]
    # Buckets of a publication and, on the first rank, the whole model when it is exported.
    sending = 3 * model.bucket_bytes
    host = peak_of({**moved, **copies}, {**moved, BUFFERS: sending}, {WEIGHTS: _starting(config, model.shape)})
    first = peak_of(host, {**moved, BUFFERS: sending + model.shape.weight_bytes})
    process = {RUNTIME: float(LEARNER + GPU_HOST)}
    return Memory(device=peak_of(*learning), in_rollouts=scoring, host={**host, **process}, first={**first, **process})


def _starting(config: LearnerConfig, shape: ModelShape) -> float:
    """Main memory that a rank needs to load the model: all of it, or at stage 3 one tensor in float32 and its share of
    the files' pages, which the ranks of a node share."""
    if stage_of(config) == 3:
        return shape.weight_bytes / config.workers + FLOAT * shape.vocabulary * shape.hidden
    return float(shape.weight_bytes if config.lora else FLOAT * shape.parameters)


def _micro_batch(config: LearnerConfig, model: Training) -> MicroBatch:
    """The largest one of a rank."""
    share = -(-model.rows // config.workers)
    return MicroBatch(min(config.micro_batch_tokens, share * model.longest), model.longest, config.gpus > 0,
                      half=config.autocast == "bfloat16", checkpointing=config.gradient_checkpointing,
                      half_model=_is_half(config, model.shape), adapter_dropout=config.drops_out,
                      compiled=config.compiles_layers and not model.shape.active_experts,
                      float32_head=model.float32_head)


def _pass_without_gradients(config: LearnerConfig, model: Training) -> dict[str, float]:
    """Memory of a pass that scores rollouts."""
    micro_batch = _micro_batch(config, model)
    answers = round(model.answers * micro_batch.tokens)
    return {LOGITS: logits_bytes(model.shape, micro_batch, answers, copies=model.logit_copies),
            ACTIVATIONS: scoring_bytes(model.shape, micro_batch) + _cast_weights(config, model.shape)}


def _update(config: LearnerConfig, model: Training, state: dict[str, float]) -> list[dict[str, float]]:
    """Memory of an update when a backward pass begins, and when the last one ends.

    When it begins, gradients of earlier micro-batches exist. A single micro-batch has none, and frees activations while
    its gradients appear; but blocks differ in size, so gradients reuse about half of them (measured on CPUs).
    """
    share, shape, micro_batch = -(-model.rows // config.workers), model.shape, _micro_batch(config, model)
    answers = round(model.answers * micro_batch.tokens)
    logits = logits_bytes(shape, micro_batch, answers, model.logit_gradients, model.logit_copies)
    layer = micro_batch.tokens * transient_bytes(shape, micro_batch)
    several = share * model.longest > micro_batch.tokens or stage_of(config) == 3  # stage 3 has a separate buffer
    before = state[GRADIENTS] * (1.0 if several else 0.5)
    first = max(logits + (0.0 if config.lora else head_bytes(shape, micro_batch)), layer)
    activations = max(training_bytes(shape, micro_batch), scoring_bytes(shape, micro_batch)) + first - logits
    return [{**state, GRADIENTS: before, LOGITS: logits, ACTIVATIONS: activations + _cast_weights(config, shape)},
            {**state, ACTIVATIONS: layer}]


def trained(config: LearnerConfig, shape: ModelShape) -> int:
    """Weights that training changes."""
    return adapter_parameters(shape, config.lora.rank) if config.lora else shape.parameters


def stage_of(config: LearnerConfig) -> int:
    """The ZeRO stage in effect: a single rank does not shard (engine/deepspeed_engine.py)."""
    alone = config.workers == 1 and config.zero_stage < 3 and not config.offload_optimizer
    return 0 if alone else config.zero_stage


def _state(config: LearnerConfig, shape: ModelShape) -> dict[str, float]:
    """Bytes of weights, gradients and moments of a rank (Rajbhandari et al. 2020, section 5, for weights in float32).

    Stage 0 holds all of them. A rank holds its shard of the moments from stage 1, of the gradients from 2, of the
    weights at 3, and from 1 the copy of its shard that the optimizer updates.
    """
    stage, world, number = stage_of(config), config.workers, trained(config, shape)
    frozen = shape.weight_bytes if config.lora else 0
    weights = (number * FLOAT + frozen) / (world if stage == 3 else 1) + _copied(config, shape)
    gradients = number * FLOAT / (world if stage >= 2 else 1)
    return {WEIGHTS: weights, GRADIENTS: gradients, OPTIMIZER: MOMENTS * FLOAT * number / (world if stage else 1)}


def _copied(config: LearnerConfig, shape: ModelShape) -> float:
    """Bytes of a rank's copy of its shard of the weights, which the optimizer updates and DeepSpeed copies back.

    Stage 3 would not need it, as the precision is the same, but DeepSpeed compares a torch.device with its name as a
    string, which are never equal (deepspeed/runtime/zero/stage3.py, `_create_fp32_partitions`), on CPUs and GPUs.
    """
    return FLOAT * trained(config, shape) / config.workers if stage_of(config) else 0.0


def _communication_bytes(config: LearnerConfig, shape: ModelShape) -> float:
    """Bytes of DeepSpeed's buffers for gradients being reduced: at stage 3 as collected, as laid out by rank, and on
    CPUs in gloo; and the weights that stage 3 leaves gathered, and a layer's as they arrive from all ranks. At stage 2
    there are two buckets, each at least as large as the embedding. Below stage 3 on CPUs, all copies together
    (`worker_memory.COPIES_ON_CPU`)."""
    stage, number = stage_of(config), trained(config, shape)
    if stage == 3:
        each = shape.bytes_per_value if config.lora else FLOAT
        gathered = min(GATHERED, shape.parameters) + shape.layer_parameters
        return (2 if config.gpus else 3) * _bucket_bytes(config, shape) + gathered * each
    if config.workers == 1:
        return 0.0
    if not config.gpus:
        return float(FLOAT * COPIES_ON_CPU[stage] * number)
    if stage == 2 and not config.offload_optimizer:
        largest = 0 if config.lora else shape.largest_parameter
        return 2.0 * FLOAT * max(SHARDED_BUCKET, largest)
    return FLOAT * REDUCE_BUCKET if stage else 0.0


def _bucket_bytes(config: LearnerConfig, shape: ModelShape) -> float:
    """Bytes of one bucket of gradients at stage 3; on CPUs no larger than the gradients."""
    return float(FLOAT * (SHARDED_BUCKET if config.gpus else min(SHARDED_BUCKET, trained(config, shape))))


def _is_half(config: LearnerConfig, shape: ModelShape) -> bool:
    """Whether weights and residual stream are in half precision as they are, except for adapters, which get and keep
    float32 without autocast."""
    return config.lora is not None and shape.bytes_per_value == HALF and config.autocast == "bfloat16"


def _cast_weights(config: LearnerConfig, shape: ModelShape) -> float:
    """Bytes of the bfloat16 weights that autocast creates for a pass and keeps for its backward pass; of sharded layers
    that are recomputed, only those of the current one."""
    if config.autocast != "bfloat16":
        return 0.0
    if _is_half(config, shape):
        return float(HALF * trained(config, shape))
    recomputed = config.recomputed(shape.layers)
    if stage_of(config) == 3 and recomputed:
        kept = shape.layers - recomputed + 2
        return min(2.0 * (kept * shape.layer_parameters + shape.vocabulary * shape.hidden), 2.0 * shape.multiplied)
    return 2.0 * shape.multiplied
