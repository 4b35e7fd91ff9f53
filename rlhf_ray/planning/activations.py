"""Memory of one pass through a model besides its weights: activations kept for the backward pass, and logits.

Counted from the tensors that our modules save for their backward passes (models/attention.py,
models/cpu/linear.py and transformers' Llama), as in Korthikanti et al. 2022, section 4.1, for gated layers, packed
rows and no dropout. Row lengths matter only where short rows keep their attention probabilities.

What layers that are compiled whole keep (`compile_layers`) is the compiler's choice, which may depend on its version.
It is counted as an H200 kept it with torch 2.11: within 3 % at 1 and 8 billion weights.
"""

from dataclasses import dataclass

from rlhf_ray.config.learner import recomputed_layers
from rlhf_ray.planning.model_shape import ModelShape

FLOAT, HALF = 4, 2
CPU_ELEMENTS, GPU_ELEMENTS, KEPT_ELEMENTS = 2**26, 2**27, 2**31
"""Logit entries that exist at the same time: on CPUs, on GPUs, and on GPUs for a backward pass without recomputation
(models/packed_model.py, `Chunks`)."""
SHORT_ROW = 128
"""Tokens of a row up to which attention on CPUs keeps its probabilities (models/cpu/short_rows.py, `LONGEST`)."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch through a model."""

    tokens: int
    """Tokens of the micro-batch."""
    longest: int
    """Tokens of its longest row."""
    on_gpu: bool
    half: bool = False
    """Whether matrix products are in bfloat16 (`autocast`), sums and norms in float32."""
    checkpointing: float = 0.0
    """Share of layers that keep only their input and recompute the rest (`gradient_checkpointing`)."""
    half_model: bool = False
    """Whether the stream is in bfloat16, too: a frozen model in its own precision, with or without adapters."""
    adapter_dropout: bool = False
    """Whether adapters keep their inputs after dropout, and which values it dropped."""
    compiled: bool = False
    """Whether each layer is compiled as a whole: normalised streams are kept as factors alone, and the activation of
    the gate is computed again."""

    float32_head: bool = False
    """Whether logits are float32 in any case (`model.float32_head`)."""

    @property
    def product_bytes(self) -> int:
        """Bytes of a value that goes into a matrix product."""
        return HALF if self.half or self.half_model else FLOAT

    @property
    def logit_bytes(self) -> int:
        """Bytes of a logit, and of its gradient."""
        return FLOAT if self.float32_head else self.product_bytes

    @property
    def converts_head(self) -> bool:
        """Whether the weight of the head is converted for a pass: CPUs have no product of bfloat16 in float32
        (models/float32_head.py; vLLM's `LogitsProcessor`)."""
        return self.float32_head and not self.on_gpu and self.product_bytes == HALF

    @property
    def stream_bytes(self) -> int:
        """Bytes of a value of the residual stream."""
        return HALF if self.half_model else FLOAT


def layer_bytes(shape: ModelShape, micro_batch: MicroBatch) -> float:
    """Bytes that one layer keeps for its backward pass, per token.

    Each of two norms keeps the stream and the normalised stream in float32, and a factor of a product. Attention keeps
    queries, keys, values and outputs, and the outputs again as a factor. The feed-forward layer keeps its gate before
    and after the activation, the up-projection, and their product; experts also keep each token's state once for each
    of its experts, before and after.
    """
    product = micro_batch.product_bytes
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    norms = 2 * shape.hidden * ((micro_batch.stream_bytes if micro_batch.compiled else 2 * FLOAT) + product)
    attention = (3 * queries + 2 * keys) * product
    if not micro_batch.on_gpu and micro_batch.longest <= SHORT_ROW and shape.heads == shape.kv_heads:
        attention += shape.heads * micro_batch.longest * FLOAT
    sent = 2 * shape.active_experts * shape.hidden * product
    dropped = 0
    if micro_batch.adapter_dropout:  # of queries, keys, values, gate and up-projection, the output, and the last layer
        dropped = ((2 + shape.matrices) * shape.hidden + queries + shape.width) * (product + 1)
    wide = (4 - micro_batch.compiled if shape.gated else 2) * shape.width * product
    return norms + attention + sent + wide + dropped


def transient_bytes(shape: ModelShape, micro_batch: MicroBatch) -> float:
    """Bytes that the layer being computed holds, per token, beyond what it keeps: the feed-forward layer's factors (in
    the backward pass, their gradients) and the stream's."""
    factors = shape.matrices * shape.width
    return factors * micro_batch.product_bytes + 2 * shape.hidden * micro_batch.stream_bytes


def training_bytes(shape: ModelShape, micro_batch: MicroBatch) -> float:
    """Bytes of activations when the backward pass of a micro-batch begins, without logits: what all layers keep, and
    the last norm, whose states are selected and passed to the head. Of the recomputed layers, one is the last."""
    kept = layer_bytes(shape, micro_batch)
    recomputed = recomputed_layers(micro_batch.checkpointing, shape.layers)
    inputs = recomputed * shape.hidden * micro_batch.stream_bytes
    per_token = inputs + (shape.layers - recomputed + bool(recomputed)) * kept
    return micro_batch.tokens * (per_token + 4 * shape.hidden * micro_batch.stream_bytes)


def scoring_bytes(shape: ModelShape, micro_batch: MicroBatch) -> float:
    """Bytes of activations of a micro-batch without gradients: those of the layer being computed."""
    return micro_batch.tokens * (transient_bytes(shape, micro_batch) + 2 * shape.hidden * micro_batch.stream_bytes)


def head_bytes(shape: ModelShape, micro_batch: MicroBatch) -> float:
    """Bytes of the output head's gradient and of its copy in the order of the weights. Both exist together with all
    activations, because the backward pass starts at the head. A head in float32 has one gradient of twice the size."""
    return 2.0 * shape.vocabulary * shape.hidden * micro_batch.product_bytes


def logits_bytes(
    shape: ModelShape, micro_batch: MicroBatch, answers: int, gradients: int = 0, copies: int = 1
) -> float:
    """Bytes of the logits that exist at the same time, and of their gradients in training; and of the head's weight as
    it is converted for them (`MicroBatch.converts_head`).

    Args:
        answers: tokens of the micro-batch whose log-probability is computed.
        gradients: of the logits, in training: one of the log-probabilities, and one of the entropies if the loss has
            an entropy bonus.
        copies: 2 if some logits are excluded in a copy, as stop tokens are before `min_tokens`.
    """
    if not shape.vocabulary:
        return 0.0
    elements = GPU_ELEMENTS if micro_batch.on_gpu else CPU_ELEMENTS
    if micro_batch.on_gpu and gradients and not micro_batch.checkpointing:
        elements = KEPT_ELEMENTS
    rows = min(answers, max(1, elements // shape.vocabulary))
    converted = FLOAT * shape.vocabulary * shape.hidden if micro_batch.converts_head else 0
    return float(rows * shape.vocabulary * micro_batch.logit_bytes * (1 + gradients) * copies + converted)
