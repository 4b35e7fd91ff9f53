"""Operations and bytes of a Llama-style model, dense or a mixture of experts, computed from its shape."""

from dataclasses import dataclass, field, replace
from typing import Self


@dataclass(frozen=True)
class ModelShape:
    """Widths and depths. Norms and biases are not counted: they are thousandths of the whole.

    Memory goes by all weights, time by those that a token is multiplied with (`active`).
    """

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
    family: str | None = None
    """`model_type` of its config.json; None for a shape without one."""
    saved_bytes: int | None = None
    """Bytes of a weight in the model's files, if config.json gives the precision."""
    context: int | None = field(default=None, compare=False)
    """Tokens of the longest sequence, if config.json limits them."""

    experts: int = 0
    """Experts of each layer in a mixture of experts; 0 for a dense model."""
    active_experts: int = 0
    """Experts that each token is sent to."""
    expert_intermediate: int = 0
    """Width of an expert."""
    shared_intermediate: int = 0
    """Width of a layer's experts that every token passes, together."""
    dense_layers: int = 0
    """Layers of a mixture of experts that have one feed-forward layer of `intermediate` instead."""
    attention: int | None = None
    """Weights of one layer's attention, if they are not four projections (latent attention)."""
    cached: int | None = None
    """Values that one layer caches for a token, if not a key and a value per head (latent attention)."""

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def width(self) -> int:
        """Largest width of what a token passes in a feed-forward layer."""
        routed = self.active_experts * self.expert_intermediate + self.shared_intermediate
        return max(routed, self.intermediate) if self.layers > self.expert_layers else routed

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer; of the larger kind, if there are two."""
        dense = self.matrices * self.hidden * self.intermediate if self.layers > self.expert_layers else 0
        return self._attention + max(dense, self._routed(self.experts))

    @property
    def _attention(self) -> int:
        projections = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_width
        return projections if self.attention is None else self.attention

    def _routed(self, experts: int) -> int:
        """Weights of the router, of some experts, and of the shared ones."""
        width = experts * self.expert_intermediate + self.shared_intermediate
        return self.hidden * (self.experts + self.matrices * width)

    def _products(self, experts: int) -> int:
        """Weights that some token is multiplied with, if only so many experts of each layer are counted."""
        dense = (self.layers - self.expert_layers) * self.matrices * self.hidden * self.intermediate
        return (self.layers * self._attention + dense + self.expert_layers * self._routed(experts)
                + self.vocabulary * self.hidden)

    @property
    def active(self) -> int:
        """Weights that each token is multiplied with: projections, feed-forward layers or its experts, output."""
        return self._products(self.active_experts)

    @property
    def multiplied(self) -> int:
        """The same, with all experts."""
        return self._products(self.experts)

    @property
    def parameters(self) -> int:
        """All weights, including an untied embedding, which is looked up and not multiplied."""
        return self.multiplied + (self.looked_up + (0 if self.tied else self.vocabulary)) * self.hidden

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights that a step over this many tokens reads: of an expert layer those of every expert that a
        token is sent to, if all experts are equally likely."""
        if not self.experts:
            return self.weight_bytes
        spared = self.experts * (1 - self.active_experts / self.experts) ** tokens
        return self.weight_bytes - (
            self.expert_layers * spared * self.matrices * self.hidden * self.expert_intermediate * self.bytes_per_value)

    @property
    def largest_parameter(self) -> int:
        """Weights of the largest tensor: the embedding, or two matrices of all experts of a layer."""
        return self.hidden * max(self.vocabulary, self.looked_up, 2 * self.experts * self.expert_intermediate)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one copy of the weights in use."""
        return self.parameters * self.bytes_per_value

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        each = 2 * self.kv_heads * self.head_width if self.cached is None else self.cached
        return self.layers * each * self.bytes_per_value

    def token_flops(self, context: float) -> float:
        """Operations of the forward pass of one token that attends to `context` tokens: two per active weight, and four
        per value attended to (Kaplan et al. 2020, table 1)."""
        return 2 * self.active + 4 * self.layers * self.heads * self.head_width * context

    def row_flops(self, length: float) -> float:
        """Operations of a forward pass over a row, whose tokens attend to half of it on average."""
        return length * self.token_flops(length / 2)

    def headless(self) -> Self:
        """The same backbone with a scalar head (a critic or reward model); its embedding is counted."""
        return replace(self, vocabulary=0, looked_up=self.vocabulary)

    def in_bytes(self, bytes_per_value: int) -> Self:
        """The same shape in another precision."""
        return replace(self, bytes_per_value=bytes_per_value)
