"""Operations and bytes of a Llama-style model, counted from its shape."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class ModelShape:
    """Widths and depths. Norms and biases are left out: thousandths of the whole."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    """0 for a model with a scalar head: its output is counted as nothing, its embedding not at all."""
    tied: bool = False
    bytes_per_value: int = 2
    """Of weights and of cached keys and values in use: 2 in bfloat16, 4 in float32."""
    head_dim: int | None = None
    """Width of an attention head where it is not hidden / heads."""
    gated: bool = True
    """Whether the feed-forward layer has a gate, so three matrices and not two."""
    looked_up: int = 0
    """Tokens of an embedding beside `vocabulary`: of a model whose output head was taken away."""

    saved_bytes: int | None = None
    """Of a weight in the model's files, where config.json tells."""

    @property
    def head_width(self) -> int:
        """Of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_width
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def multiplied(self) -> int:
        """Weights that every token is multiplied with: projections, feed-forward layer, output."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights: an untied embedding is looked up, and multiplied with nothing."""
        return self.multiplied + (self.looked_up + (0 if self.tied else self.vocabulary)) * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Of one copy in use."""
        return self.parameters * self.bytes_per_value

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * self.bytes_per_value

    def token_flops(self, context: float) -> float:
        """Of one token's forward pass that attends to `context` tokens: two for each weight, and four for each value
        attended to (Kaplan et al. 2020, table 1)."""
        return 2 * self.multiplied + 4 * self.layers * self.hidden * context

    def row_flops(self, length: float) -> float:
        """Of a forward pass over a whole row: its tokens attend to half of it on average."""
        return length * self.token_flops(length / 2)

    def scalar(self) -> Self:
        """The same backbone with a scalar head: a critic or a reward model, as far as time goes."""
        return replace(self, vocabulary=0)

    def headless(self) -> Self:
        """The same, whose embedding is there and is counted: as far as memory goes."""
        return replace(self, vocabulary=0, looked_up=self.vocabulary)

    def in_bytes(self, bytes_per_value: int) -> Self:
        """The same in another precision."""
        return replace(self, bytes_per_value=bytes_per_value)


LLAMA_70B = ModelShape(hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, vocabulary=128256)
"""Llama 3 70B (Dubey et al. 2024, table 3): 70.6 billion weights."""
