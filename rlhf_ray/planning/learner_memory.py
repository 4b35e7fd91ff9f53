"""Memory of one rank of a model under training: DeepSpeed's shares at each ZeRO stage, activations, copies to save."""

from dataclasses import dataclass

from rlhf_ray.config.learner import SHARDED_BUCKET, LearnerConfig, PPOLearnerConfig
from rlhf_ray.planning.activations import (
    FLOAT,
    Pass,
    head_bytes,
    logits_bytes,
    passing_bytes,
    scoring_bytes,
    training_bytes,
)
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.worker_memory import (
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
    at_the_peak,
)

MOMENTS = 2
"""Numbers that AdamW keeps of a weight."""


@dataclass(frozen=True)
class Training:
    """A model under training, and what passes through it."""

    shape: ModelShape
    """`bytes_per_value` is that of the model's own precision, in which it is published."""
    longest: int
    """Tokens of its longest row."""
    answers: float
    """Share of a micro-batch's tokens whose log-probability is asked for; 0 with a scalar head."""
    rows: int
    """Of one optimizer step, over all ranks: a micro-batch holds no more than a rank's share of them."""
    average: bool = False
    """Whether an average of the weights is kept (`policy.ema_decay`)."""
    bucket_bytes: float = 0.0
    """Of a publication; 0 for a model that is not published."""
    direct: bool = False
    """Whether publications go from GPU to GPU, and not through main memory (`weights.transport`)."""


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Weights of adapters beside every linear layer of a block (Hu et al. 2021): rank x (inputs + outputs) each."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    forward = (3 if shape.gated else 2) * (shape.hidden + shape.intermediate)
    return shape.layers * rank * (attention + forward)


def learner_memory(config: LearnerConfig, model: Training) -> Memory:
    """One rank's at the moment when it holds most: in a backward pass or, on the CPU, while a checkpoint is copied."""
    on_gpu, world, number = config.gpus > 0, config.workers, trained(config, model.shape)
    state = _state(config, model.shape)
    average = FLOAT * number / world if model.average else 0.0
    buffers = {BUFFERS: _communication_bytes(config, model.shape) + average}
    sharded = stage_of(config) == 3
    copies = {COPIES: (1 + MOMENTS + model.average) * FLOAT * number / world}
    if not on_gpu:
        process = {RUNTIME: float(LEARNER + (ADAPTERS if config.lora else 0))}
        learning = [{**moment, **buffers, **process} for moment in _update(config, model, state)]
        # Stage 3 gives its buffers back, but for those of gradients; below, what was freed is kept
        # (cluster/actor_class.py).
        between = {BUFFERS: average + _bucket_bytes(config, model.shape)} if sharded else {**buffers, GRADIENTS: 0.0}
        return Memory(host=at_the_peak(*learning, {**state, **copies, **between, **process}))
    moved: dict[str, float] = {}
    if config.offload_optimizer:  # with the moments go the copy of the weights, and gradients of its size to step by
        copied = _copied(config, model.shape)
        moved = {OPTIMIZER: state.pop(OPTIMIZER), WEIGHTS: copied, GRADIENTS: copied}
        state[WEIGHTS] -= copied
    elif isinstance(config, PPOLearnerConfig) and config.offload_between_phases:
        moved = {OPTIMIZER: state[OPTIMIZER]}
    buffers[BUFFERS] += 2 * model.bucket_bytes * model.direct
    learning = [{**moment, **buffers, RUNTIME: GPU_CONTEXT} for moment in _update(config, model, state)]
    # A publication's buckets under way and, on the first rank, the whole model when it is exported.
    sending = 3 * model.bucket_bytes
    host = at_the_peak({**moved, **copies}, {**moved, BUFFERS: sending}, {WEIGHTS: _starting(config, model.shape)})
    first = at_the_peak(host, {**moved, BUFFERS: sending + model.shape.weight_bytes})
    process = {RUNTIME: float(LEARNER + GPU_HOST)}
    return Memory(device=at_the_peak(*learning), host={**host, **process}, first={**first, **process})


def _starting(config: LearnerConfig, shape: ModelShape) -> float:
    """Main memory in which a rank has the model before it is on the devices: whole, or at stage 3 a tensor in float32
    and its share of the files' pages, which are there once for all ranks of a node."""
    if stage_of(config) == 3:
        return shape.weight_bytes / config.workers + FLOAT * shape.vocabulary * shape.hidden
    return float(shape.weight_bytes if config.lora else FLOAT * shape.parameters)


def _update(config: LearnerConfig, model: Training, state: dict[str, float]) -> list[dict[str, float]]:
    """What an update holds when a backward pass begins, and when the last one is over. Gradients of micro-batches
    before are there in the first case. A single micro-batch has none then, and while its own come its activations go;
    but their blocks are of other sizes, so gradients find room in half of them (seen on CPUs)."""
    share, shape = -(-model.rows // config.workers), model.shape
    a_pass = Pass(min(config.micro_batch_tokens, share * model.longest), model.longest, config.gpus > 0,
                  half=config.autocast == "bfloat16", checkpointing=config.gradient_checkpointing)
    logits = logits_bytes(shape, a_pass, round(model.answers * a_pass.tokens), training=True)
    layer = a_pass.tokens * passing_bytes(shape, a_pass)
    several = share * model.longest > a_pass.tokens or stage_of(config) == 3  # which has a buffer of its own for them
    before = state[GRADIENTS] * (1.0 if several else 0.5)
    first = max(logits + (0.0 if config.lora else head_bytes(shape, a_pass)), layer)
    activations = max(training_bytes(shape, a_pass), scoring_bytes(shape, a_pass)) + first - logits
    return [{**state, GRADIENTS: before, LOGITS: logits, ACTIVATIONS: activations + _cast_weights(config, shape)},
            {**state, ACTIVATIONS: layer}]


def trained(config: LearnerConfig, shape: ModelShape) -> int:
    """Weights that training changes."""
    return adapter_parameters(shape, config.lora.rank) if config.lora else shape.parameters


def stage_of(config: LearnerConfig) -> int:
    """The ZeRO stage that runs: one rank has nobody to share with (engine/train_engine.py)."""
    alone = config.workers == 1 and config.zero_stage < 3 and not config.offload_optimizer
    return 0 if alone else config.zero_stage


def _state(config: LearnerConfig, shape: ModelShape) -> dict[str, float]:
    """Weights, gradients and moments of a rank (Rajbhandari et al. 2020, section 5, for weights in float32): all of
    them at stage 0; its share of the moments from 1 on, of the gradients from 2 on, of the weights at 3, and from 1 on
    the copy of its share that the optimizer changes."""
    stage, world, number = stage_of(config), config.workers, trained(config, shape)
    frozen = shape.weight_bytes if config.lora else 0
    weights = (number * FLOAT + frozen) / (world if stage == 3 else 1) + _copied(config, shape)
    gradients = number * FLOAT / (world if stage >= 2 else 1)
    return {WEIGHTS: weights, GRADIENTS: gradients, OPTIMIZER: MOMENTS * FLOAT * number / (world if stage else 1)}


def _copied(config: LearnerConfig, shape: ModelShape) -> float:
    """A rank's copy of its share of the weights, which the optimizer changes and DeepSpeed copies back. Stage 3 could
    do without, their precision being the same, but compares a torch.device with its name as text, which are never
    equal (deepspeed/runtime/zero/stage3.py, `_create_fp32_partitions`), on CPUs and GPUs alike."""
    return FLOAT * trained(config, shape) / config.workers if stage_of(config) else 0.0


def _communication_bytes(config: LearnerConfig, shape: ModelShape) -> float:
    """DeepSpeed's buffer for gradients on their way to other ranks: at stage 3 as they were collected, laid out by
    rank, and on CPUs in gloo's hands; there, too, the weights that it leaves gathered. Below stage 3 on CPUs what there
    are of copies in all (`worker_memory.COPIES_ON_CPU`)."""
    stage, number = stage_of(config), trained(config, shape)
    if stage == 3:
        each = shape.bytes_per_value if config.lora else FLOAT
        return (2 if config.gpus else 3) * _bucket_bytes(config, shape) + min(GATHERED, shape.parameters) * each
    if config.workers == 1:
        return 0.0
    if not config.gpus:
        return float(FLOAT * COPIES_ON_CPU[stage] * number)
    return FLOAT * REDUCE_BUCKET if stage else 0.0


def _bucket_bytes(config: LearnerConfig, shape: ModelShape) -> float:
    """One bucket of gradients at stage 3: on CPUs as much of it as there are."""
    return float(FLOAT * (SHARDED_BUCKET if config.gpus else min(SHARDED_BUCKET, trained(config, shape))))


def _cast_weights(config: LearnerConfig, shape: ModelShape) -> float:
    """Weights in bfloat16 that autocast makes for a pass and keeps for its backward pass; with activation
    checkpointing and sharded weights, those of the layer at work."""
    if config.autocast != "bfloat16":
        return 0.0
    if stage_of(config) == 3 and config.gradient_checkpointing:
        return 2.0 * (2 * shape.layer_parameters + shape.vocabulary * shape.hidden)
    return 2.0 * shape.multiplied
