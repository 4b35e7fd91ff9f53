"""What a pass through a model holds beside its weights: activations for the backward pass, and logits.

Counted from the tensors that our modules save for their backward passes (models/attention.py,
models/onednn_linear.py and transformers' Llama), in the way of Korthikanti et al. 2022, section 4.1, for gated layers,
packed rows and without dropout. Lengths count where short rows keep their attention's probabilities.
"""

from dataclasses import dataclass

from rlhf_ray.planning.model_shape import ModelShape

FLOAT, HALF = 4, 2
LOGIT_ELEMENTS = 2**26
"""Entries of logits that exist at a time (models/packed_model.py, `Chunks`)."""
SHORT_ROW = 128
"""Tokens up to which attention on CPUs keeps its probabilities (models/short_row_attention.py, `LONGEST`)."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch through a model."""

    tokens: int
    """Of the micro-batch."""
    longest: int
    """Of its longest row."""
    on_gpu: bool
    half: bool = False
    """Matrix products in bfloat16 (`autocast`), sums and norms in float32."""
    checkpointing: bool = False
    """Layers keep their input alone, and are passed through again (`gradient_checkpointing`)."""
    half_model: bool = False
    """Everything in bfloat16: a frozen model in its own precision."""

    @property
    def product_bytes(self) -> int:
        """Of a value that goes into a matrix product."""
        return HALF if self.half or self.half_model else FLOAT

    @property
    def stream_bytes(self) -> int:
        """Of a value of the residual stream."""
        return HALF if self.half_model else FLOAT


def layer_bytes(shape: ModelShape, a_pass: Pass) -> float:
    """Kept by one layer for its backward pass, for each token.

    Each of two norms keeps the stream and the normalised stream, and gives a product's factor; attention keeps
    queries, keys, values and answers, and the answers again as a factor; the feed-forward layer its gate before and
    after the activation, the other half, and their product.
    """
    stream, product = a_pass.stream_bytes, a_pass.product_bytes
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    norms = 2 * shape.hidden * (2 * stream + product)
    attention = (3 * queries + 2 * keys) * product
    if not a_pass.on_gpu and a_pass.longest <= SHORT_ROW and shape.heads == shape.kv_heads:
        attention += shape.heads * a_pass.longest * FLOAT
    return norms + attention + (4 if shape.gated else 2) * shape.intermediate * product


def passing_bytes(shape: ModelShape, a_pass: Pass) -> float:
    """Held by the layer that a pass is in, for each token, beyond what it keeps: the feed-forward layer's factors,
    going back their gradients, and the stream's."""
    factors = (3 if shape.gated else 2) * shape.intermediate
    return factors * a_pass.product_bytes + 2 * shape.hidden * a_pass.stream_bytes


def training_bytes(shape: ModelShape, a_pass: Pass) -> float:
    """Activations of a micro-batch when its backward pass begins, the logits left out: what all layers keep and the
    last norm, whose states are picked and given to the head."""
    kept = layer_bytes(shape, a_pass)
    each = (shape.layers * shape.hidden * a_pass.stream_bytes + kept if a_pass.checkpointing else shape.layers * kept)
    return a_pass.tokens * (each + 4 * shape.hidden * a_pass.stream_bytes)


def scoring_bytes(shape: ModelShape, a_pass: Pass) -> float:
    """Activations of a micro-batch without gradients: those of the layer that it is in."""
    return a_pass.tokens * (passing_bytes(shape, a_pass) + 2 * shape.hidden * a_pass.stream_bytes)


def head_bytes(shape: ModelShape, a_pass: Pass) -> float:
    """The output head's gradient as it is made, and a copy of it in the order of the weights: both are there beside
    all activations, since the head is the first that a backward pass comes to."""
    return 2.0 * shape.vocabulary * shape.hidden * a_pass.product_bytes


def logits_bytes(shape: ModelShape, a_pass: Pass, answers: int, training: bool) -> float:
    """Logits that exist at a time, with their gradient where there is one.

    Args:
        answers: tokens of the micro-batch whose log-probability is asked for.
    """
    if not shape.vocabulary:
        return 0.0
    rows = min(answers, max(1, LOGIT_ELEMENTS // shape.vocabulary))
    working = 3 * 2**24 * FLOAT if a_pass.on_gpu else 0  # algorithms/logprobs.py works through so many at a time
    return rows * shape.vocabulary * a_pass.product_bytes * (2 if training else 1) + working
