"""Memory of one rank of a model under training: DeepSpeed's shares at each ZeRO stage, activations, copies to save."""

from dataclasses import dataclass

from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.planning.activations import FLOAT, Pass, logits_bytes, scoring_bytes, training_bytes
from rlhf_ray.planning.memory import (
    ACTIVATIONS,
    BUFFERS,
    COPIES,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    RUNTIME,
    WEIGHTS,
    Memory,
    at_the_peak,
)
from rlhf_ray.planning.model_shape import ModelShape
from rlhf_ray.planning.runtime import GPU_CONTEXT, GPU_HOST, LEARNER, REDUCE_BUCKET

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


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Weights of adapters beside every linear layer of a block (Hu et al. 2021): rank x (inputs + outputs) each."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    forward = (3 if shape.gated else 2) * (shape.hidden + shape.intermediate)
    return shape.layers * rank * (attention + forward)


def learner_memory(config: LearnerConfig, model: Training) -> Memory:
    """One rank's at the moment when it holds most: in a backward pass or, on the CPU, while a checkpoint is copied."""
    on_gpu, world = config.gpus > 0, config.workers
    most = -(-model.rows // world) * model.longest
    a_pass = Pass(min(config.micro_batch_tokens, most), model.longest, on_gpu, half=config.autocast == "bfloat16",
                  checkpointing=config.gradient_checkpointing)
    state = _state(config, model.shape)
    working = {
        ACTIVATIONS: max(training_bytes(model.shape, a_pass), scoring_bytes(model.shape, a_pass))
        + _cast_weights(config, model.shape),
        LOGITS: logits_bytes(model.shape, a_pass, round(model.answers * a_pass.tokens), training=True),
    }
    copies = {COPIES: (1 + MOMENTS + model.average) * FLOAT * trained(config, model.shape) / world}
    average = FLOAT * trained(config, model.shape) / world if model.average else 0.0
    buffers = {BUFFERS: _reduction_bytes(config, model.shape) + average}
    sending = {BUFFERS: 3 * model.bucket_bytes + model.shape.weight_bytes * (model.bucket_bytes > 0)}
    if not on_gpu:
        learning = {**state, **working, **buffers, RUNTIME: LEARNER}
        saving = {**state, **buffers, **copies, RUNTIME: LEARNER}
        return Memory(host=at_the_peak(learning, saving))
    moved = {OPTIMIZER: state.pop(OPTIMIZER)} if config.offload_optimizer else {}
    return Memory(device={**state, **working, **buffers, RUNTIME: GPU_CONTEXT},
                  host={**moved, **at_the_peak(copies, sending), RUNTIME: LEARNER + GPU_HOST})


def trained(config: LearnerConfig, shape: ModelShape) -> int:
    """Weights that training changes."""
    return adapter_parameters(shape, config.lora.rank) if config.lora else shape.parameters


def stage_of(config: LearnerConfig) -> int:
    """The ZeRO stage that runs: one rank has nobody to share with (engine/train_engine.py)."""
    alone = config.workers == 1 and config.zero_stage < 3 and not config.offload_optimizer
    return 0 if alone else config.zero_stage


def _state(config: LearnerConfig, shape: ModelShape) -> dict[str, float]:
    """Weights, gradients and moments of a rank (Rajbhandari et al. 2020, section 5, for weights in float32): all of
    them at stage 0; its share of the moments from 1 on, of the gradients from 2 on, of the weights at 3. Stages 1 and
    2 change a copy of its share of the weights, and copy it back."""
    stage, world, number = stage_of(config), config.workers, trained(config, shape)
    frozen = shape.weight_bytes if config.lora else 0
    weights = (number * FLOAT + frozen) / (world if stage == 3 else 1)
    if stage in (1, 2):
        weights += number * FLOAT / world
    gradients = number * FLOAT / (world if stage >= 2 else 1)
    return {WEIGHTS: weights, GRADIENTS: gradients, OPTIMIZER: MOMENTS * FLOAT * number / (world if stage else 1)}


def _reduction_bytes(config: LearnerConfig, shape: ModelShape) -> float:
    """DeepSpeed's buffers for gradients on their way to other ranks, and at stage 3 gathered weights: two layers, one
    in use and one under way. On CPUs, where memory that is not written to takes none, what gradients fill of them."""
    stage, number = stage_of(config), trained(config, shape)
    if stage == 0:
        return 0.0
    bucket = REDUCE_BUCKET if config.gpus else min(REDUCE_BUCKET, number)
    gathered = 2 * shape.layer_parameters + shape.vocabulary * shape.hidden if stage == 3 else 0
    return FLOAT * (bucket + gathered)


def _cast_weights(config: LearnerConfig, shape: ModelShape) -> float:
    """Weights in bfloat16 that autocast makes for a pass and keeps for its backward pass; with activation
    checkpointing and sharded weights, those of the layer at work."""
    if config.autocast != "bfloat16":
        return 0.0
    if stage_of(config) == 3 and config.gradient_checkpointing:
        return 2.0 * (2 * shape.layer_parameters + shape.vocabulary * shape.hidden)
    return 2.0 * shape.multiplied
