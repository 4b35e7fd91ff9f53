"""Transformers models on packed rows, as the modules that DeepSpeed wraps: language model, scalar model, actor-critic
with a shared backbone, process reward model. All computation with parameters happens in `forward`. Inputs and outputs
are packed; a family that cannot run on packed rows gets them padded (`hidden_states`)."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from rlhf_ray.algorithms.logprobs import SamplingMask, masked_distributions, token_logprobs
from rlhf_ray.algorithms.logprobs import entropy as entropy_of
from rlhf_ray.internals.transformers import attention_implementation
from rlhf_ray.models.attention import NAME as PACKED_ATTENTION
from rlhf_ray.models.cpu.linear import filler_of
from rlhf_ray.models.output_head import logits_of
from rlhf_ray.models.packing import Packing, to_device, without_filler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def runs_packed(model: "PreTrainedModel") -> bool:
    """Whether the model was loaded with attention over packed rows."""
    return attention_implementation(model) == PACKED_ATTENTION


def hidden_states(model: "PreTrainedModel", tokens: Tensor, packing: Packing) -> Tensor:
    """[T, hidden] last hidden states of packed rows: in one row with attention over packed rows if the model was loaded
    with it, else in a grid with transformers' own attention. The grid is padded at the ends of rows, to which no
    earlier token attends in a causal model."""
    backbone = model.get_decoder()
    if not runs_packed(model):
        mask = packing.to_grid(torch.ones_like(tokens))
        grid = backbone(input_ids=packing.to_grid(tokens), attention_mask=mask, use_cache=False).last_hidden_state
        return packing.from_grid(grid)
    filler = filler_of(tokens)
    packing.prepare()
    output = backbone(
        input_ids=pad(tokens, (0, filler))[None], position_ids=pad(packing.positions, (0, filler))[None],
        use_cache=False, packing=packing,
    )
    return without_filler(output.last_hidden_state.squeeze(0), filler)


CPU_ELEMENTS, GPU_ELEMENTS = 2**26, 2**27
"""256 MiB of float32, and of bfloat16 under autocast. Without gradients, chunks cost nothing."""
KEPT_ELEMENTS = 2**31
"""4 GiB of bfloat16 under autocast, on GPUs. With gradients, several chunks cost time: the backward pass computes each
again, and adds, in the logits' precision, to the gradient of the whole head. The size is fixed and not a part of the
memory that is free, so that a resumed run computes the same; the plan counts it."""


@dataclass(frozen=True)
class Chunks:
    """How many tokens' logits exist at a time."""

    elements: int | None = None
    """Elements of the largest chunk, tokens times vocabulary; None for those of the device and pass."""
    most_tokens: int | None = None
    """Cut every pass into as many chunks as one of this many tokens, for ranks whose calls of the head must match."""
    recomputed: bool = False
    """Save memory rather than time: no more than `GPU_ELEMENTS` in passes with gradients, too."""

    def count(self, tokens: int, vocabulary: int, on_gpu: bool = False, gradients: bool = False) -> int:
        """Number of chunks for `tokens` tokens, in a pass with gradients or without; chunks may be empty."""
        usual = GPU_ELEMENTS if on_gpu else CPU_ELEMENTS
        if on_gpu and gradients and not self.recomputed:
            usual = KEPT_ELEMENTS
        rows = max(1, (self.elements or usual) // vocabulary)
        return max(1, -(-(tokens if self.most_tokens is None else self.most_tokens) // rows))


CHUNKS = Chunks()


def token_logprobs_and_entropies(
    model: "PreTrainedModel", hidden: Tensor, targets: Tensor, temperature: float, chunks: Chunks, entropy: bool,
    mask: SamplingMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[n] log-probabilities of `targets` [n] given the states `hidden` [n, hidden] before them, and [n] entropies or
    None. With several chunks only the logits of one exist at a time; the backward pass recomputes them."""
    filler = filler_of(targets)
    hidden, targets = pad(hidden, (0, 0, 0, filler)), pad(targets, (0, filler))

    def columns_of(states: Tensor, tokens: Tensor, mask: SamplingMask | None) -> tuple[Tensor, ...]:
        logits = logits_of(model, states)
        if mask:
            logits, tokens = masked_distributions(logits, tokens, mask)
        logprobs = token_logprobs(logits, tokens, temperature)
        return (logprobs, entropy_of(logits, temperature)) if entropy else (logprobs,)

    vocabulary = model.config.get_text_config().vocab_size
    pieces = chunks.count(len(targets), vocabulary, hidden.is_cuda, torch.is_grad_enabled())
    masks = mask.padded(filler).split(pieces) if mask else [None] * pieces
    if pieces == 1:
        chunked = [columns_of(hidden, targets, masks[0])]
    else:
        chunked = [checkpoint(columns_of, *piece, use_reentrant=False)
                   for piece in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), masks, strict=True)]
    logprobs, *entropies = (without_filler(torch.cat(column), filler) for column in zip(*chunked, strict=True))
    return logprobs, entropies[0] if entropy else None


class PackedLanguageModel(nn.Module):
    """A causal language model that returns log-probabilities of given tokens."""

    def __init__(self, model: "PreTrainedModel", temperature: float = 1.0, chunks: Chunks = CHUNKS) -> None:
        super().__init__()
        self.model, self.temperature, self.chunks = model, temperature, chunks

    def forward(
        self, tokens: Tensor, packing: Packing, predicted: Tensor, entropy: bool = False,
        temperature: float | None = None, mask: SamplingMask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the tokens at `predicted` given the tokens before them in their row.

        Logits are computed only for those positions, in chunks of the size that `chunks` sets.

        Args:
            tokens: [T] int64 packed rows.
            packing: the rows' lengths and positions.
            predicted: [n] flat positions of the tokens; never the first of a row.
            entropy: also return the entropy of each token's distribution.
            temperature: overrides the module's temperature.
            mask: of the tokens at `predicted`, if they were not sampled among all tokens.

        Returns:
            [n] float32 log-probabilities at the temperature, and [n] entropies in nats or None.
        """
        hidden = hidden_states(self.model, tokens, packing).index_select(0, predicted - 1)
        return token_logprobs_and_entropies(self.model, hidden, tokens[predicted], temperature or self.temperature,
                                            self.chunks, entropy, mask)


def scalar_outputs(head: nn.Module, states: Tensor) -> Tensor:
    """[T, labels] outputs of a scalar head in the precision of its weights, also under autocast: bfloat16 has eight
    significant bits, too few for values and scores, of which differences are taken."""
    kind = states.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        outputs: Tensor = head(states.to(head.weight.dtype))
        return outputs


class PackedScalarModel(nn.Module):
    """A backbone with a scalar head: a critic (one value per token) or a reward model (one score per row). A head in
    half precision is converted to float32.

    Args:
        dropout: of the hidden states before the head, in training mode.
    """

    def __init__(self, model: "PreTrainedModel", dropout: float = 0.0) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(dropout)
        if hasattr(model, "score"):  # encoders have heads of their own
            model.score.to(torch.promote_types(model.score.weight.dtype, torch.float32))

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """[T] float32 head outputs, one per token, each from the row up to and including that token; `[T, labels]` from
        a head with several."""
        hidden = self.dropout(hidden_states(self.model, tokens, packing))
        return scalar_outputs(self.model.score, hidden).squeeze(-1)


class PackedActorCritic(nn.Module):
    """A language model with a value head: log-probabilities of tokens and values of the states before them in one pass.

    The value head is not part of `model`: only the language model is published to generators and exported.
    """

    def __init__(self, model: "PreTrainedModel", temperature: float = 1.0, chunks: Chunks = CHUNKS) -> None:
        super().__init__()
        self.model, self.temperature, self.chunks = model, temperature, chunks
        size = model.get_output_embeddings().in_features
        self.value_head = nn.Linear(size, 1, bias=False)
        nn.init.normal_(self.value_head.weight, std=(size + 1) ** -0.5)  # as `load_scalar_model`

    def forward(
        self, tokens: Tensor, packing: Packing, predicted: Tensor, entropy: bool = False,
        temperature: float | None = None, mask: SamplingMask | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """As `PackedLanguageModel.forward`, plus [n] float32 values of the states before the tokens at `predicted`."""
        hidden = hidden_states(self.model, tokens, packing).index_select(0, predicted - 1)
        logprobs, entropies = token_logprobs_and_entropies(
            self.model, hidden, tokens[predicted], temperature or self.temperature, self.chunks, entropy, mask)
        return logprobs, entropies, scalar_outputs(self.value_head, hidden).squeeze(-1)


def last_token_scores(outputs: Tensor, packing: Packing) -> Tensor:
    """[N] outputs at each row's last token: a reward model's scores."""
    return outputs[to_device(packing.ends - 1, outputs.device)]


def values_before_tokens(outputs: Tensor, predicted: Tensor) -> Tensor:
    """[n] critic values of the state *before* each token at `predicted`, which are its outputs one token earlier."""
    return outputs[predicted - 1]


class PackedStepModel(nn.Module):
    """A process reward model: a causal language model that predicts labels at placeholder tokens."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, packing: Packing, placeholders: Tensor) -> Tensor:
        """[P, V] logits at the placeholders; no other logits are computed.

        Args:
            tokens: [T] int64 packed rows.
            placeholders: [P] flat positions. Each prediction uses its row up to and including the placeholder.
        """
        hidden = hidden_states(self.model, tokens, packing).index_select(0, placeholders)
        return logits_of(self.model, hidden)


def step_values(logits: Tensor, labels: list[int], values: Sequence[float]) -> Tensor:
    """[P] float32 expected value of each step's label, from `[P, V]` logits over the label tokens: for a good and a bad
    one of values 1 and 0 the probability of the good one (Wang et al. 2024, section 3.3)."""
    if list(values) == [1, 0]:
        return (logits[:, labels[0]].float() - logits[:, labels[1]].float()).sigmoid()
    return logits[:, labels].float().softmax(-1) @ torch.tensor(values, dtype=torch.float32, device=logits.device)
