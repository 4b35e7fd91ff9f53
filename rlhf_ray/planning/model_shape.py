"""Operations and bytes of a Llama-style model, computed from its shape."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class ModelShape:
    """Widths and depths. Norms and biases are not counted: they are thousandths of the whole."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    """0 for a model with a scalar head, whose output and embedding are not counted."""
    tied: bool = False
    bytes_per_value: int = 2
    """Bytes of a weight, and of a cached key or value, in use: 2 in bfloat16, 4 in float32."""
    head_dim: int | None = None
    """Width of an attention head if it is not hidden / heads."""
    gated: bool = True
    """Whether the feed-forward layer is gated, so that it has three matrices instead of two."""
    looked_up: int = 0
    """Tokens of an embedding in addition to `vocabulary`, in a model whose output head was removed."""
    saved_bytes: int | None = None
    """Bytes of a weight in the model's files, if config.json gives the precision."""

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_width
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def multiplied(self) -> int:
        """Weights that every token is multiplied with: projections, feed-forward layers, output."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, including an untied embedding, which is looked up and not multiplied."""
        return self.multiplied + (self.looked_up + (0 if self.tied else self.vocabulary)) * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of one copy of the weights in use."""
        return self.parameters * self.bytes_per_value

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * self.bytes_per_value

    def token_flops(self, context: float) -> float:
        """Operations of the forward pass of one token that attends to `context` tokens: two per weight, and four per
        value attended to (Kaplan et al. 2020, table 1)."""
        return 2 * self.multiplied + 4 * self.layers * self.hidden * context

    def row_flops(self, length: float) -> float:
        """Operations of a forward pass over a row, whose tokens attend to half of it on average."""
        return length * self.token_flops(length / 2)

    def scalar(self) -> Self:
        """The same backbone with a scalar head (a critic or reward model), for estimates of time."""
        return replace(self, vocabulary=0)

    def headless(self) -> Self:
        """The same with its embedding counted, for estimates of memory."""
        return replace(self, vocabulary=0, looked_up=self.vocabulary)

    def in_bytes(self, bytes_per_value: int) -> Self:
        """The same shape in another precision."""
        return replace(self, bytes_per_value=bytes_per_value)


LLAMA_70B = ModelShape(hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, vocabulary=128256)
"""Llama 3 70B (Dubey et al. 2024, table 3): 70.6 billion weights."""
