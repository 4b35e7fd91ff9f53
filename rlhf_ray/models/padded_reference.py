"""Transformers' own forward pass of a packed module's model, on padded rows: what packed passes are held against.

An oracle: nothing here goes through our attention, our linear layers, or the way in which packed modules get from
hidden states to answers. Logits come out of the family's own forward pass, so that its soft-caps, logit scales and
biases are in them; but only at the positions compared, since all of a long row's would be larger than the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_ray.errors import ModelError
from rlhf_ray.models.onednn_linear import OneDNNLinear
from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel, PackedScalarModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_SCORES = 2**26
"""Entries of the scores of one layer's attention up to which rows are computed by the plain products of "eager", which
honours all that a family adds to them; 256 MiB of float32."""
LARGEST_MASK = 2**26
"""Entries of a mask of attention up to which one is given; a single row needs none, being causal."""


@dataclass(frozen=True)
class PaddedRows:
    """Some rows as transformers reads them, and where in them the positions compared lie."""

    tokens: Tensor
    """[B, L] int64, padded on the right."""
    mask: Tensor | None
    """[B, L] 1 on tokens; None where a single row needs none."""
    cells: Tensor
    """[t] flattened cells of all tokens, in the order of the packed rows."""
    seen: Tensor
    """[n] flattened cells of the positions compared."""
    targets: Tensor
    """[n] the tokens whose log-probabilities are compared."""

    @classmethod
    def of(cls, rows: list[Tensor], seen: list[Tensor], targets: Tensor, extra: int) -> "PaddedRows":
        """Rows of tokens, padded to `extra` more than the longest.

        Args:
            seen: of each row, the positions compared.
            targets: [n] for all of these.
        """
        length = max(map(len, rows)) + extra
        tokens = torch.stack([pad(row, (0, length - len(row))) for row in rows])
        mask = torch.stack([pad(torch.ones_like(row), (0, length - len(row))) for row in rows])
        masked = len(rows) > 1 or length**2 <= LARGEST_MASK
        return cls(tokens, mask if masked else None, mask.flatten().nonzero()[:, 0],
                   torch.cat([i * length + places for i, places in enumerate(seen)]), targets)


def answers(module: nn.Module, rows: PaddedRows) -> tuple[Tensor, ...]:
    """Columns of [n] numbers at the positions compared: what the packed module gives there.

    Raises:
        ModelError: the family's forward pass does not go through its output head once.
    """
    model: Any = module.model
    if isinstance(module, PackedScalarModel):
        hidden = _states(model.base_model(**_inputs(rows)).last_hidden_state, rows.seen)
        return (model.score(hidden.to(model.score.weight.dtype)).squeeze(-1).float(),)
    with _asked_at(model, rows.seen) as (of_backbone, of_head):
        logits = model(**_inputs(rows)).logits
    if logits.shape[:2] != (1, len(rows.seen)) or len(of_head) != 1:
        raise ModelError(f"the output head of {type(model).__name__} is not called once with all hidden states")
    distribution = (logits[0].float() / getattr(module, "temperature", 1.0)).log_softmax(-1)
    logprobs = distribution.gather(-1, rows.targets[:, None])[:, 0]
    if not isinstance(module, (PackedLanguageModel, PackedActorCritic)):
        return (logprobs,)
    entropies = -(distribution.exp() * distribution).sum(-1)
    if isinstance(module, PackedLanguageModel):
        return logprobs, entropies
    (states,) = of_backbone or of_head  # OPT's forward pass reaches into the backbone without calling it
    values = module.value_head(states.to(module.value_head.weight.dtype)).squeeze(-1)
    return logprobs, entropies, values.float()


@contextmanager
def transformers_layers(model: "PreTrainedModel", attention: str) -> Iterator[None]:
    """Inside, the model computes attention and linear layers as transformers has them; restored whatever happens."""
    ours, layers = model.config._attn_implementation, [m for m in model.modules() if type(m) is OneDNNLinear]
    try:
        model.set_attn_implementation(attention)
        for layer in layers:
            layer.__class__ = nn.Linear
        yield
    finally:
        for layer in layers:
            layer.__class__ = OneDNNLinear
        model.set_attn_implementation(ours)


def attention_implementation_for(model: "PreTrainedModel", rows: int, tokens: int) -> str:
    """Which of transformers' implementations is right for this family and affordable for such padded rows."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 1)
    if rows * heads * tokens**2 <= LARGEST_SCORES or not model._supports_sdpa:
        return "eager"
    return "sdpa"


def longest_affordable_row(model: "PreTrainedModel", tokens: int) -> int:
    """The longest row, of at most so many tokens, that transformers' own attention computes in bounded memory."""
    if model._supports_sdpa:
        return tokens
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 1)
    return min(tokens, int((LARGEST_SCORES / heads) ** 0.5))


def _inputs(rows: PaddedRows) -> dict[str, Any]:
    return {"input_ids": rows.tokens, "attention_mask": rows.mask, "use_cache": False}


def _states(hidden: Tensor, cells: Tensor) -> Tensor:
    """[n, hidden] states at flattened cells of `[B, L, hidden]`."""
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, cells)


@contextmanager
def _asked_at(model: Any, cells: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Inside, the output head is given the states at these cells alone, as one row; yields the states there that the
    backbone gives and those that the head is given. What the family does with logits is done to each entry, and so to
    these as to all."""
    of_backbone: list[Tensor] = []
    of_head: list[Tensor] = []

    def ask(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        of_head.append(_states(given[0], cells))
        return (of_head[-1][None], *given[1:])

    hooks = [model.base_model.register_forward_hook(
                 lambda _, __, output: of_backbone.append(_states(output.last_hidden_state, cells))),
             model.get_output_embeddings().register_forward_pre_hook(ask)]
    try:
        yield of_backbone, of_head
    finally:
        for hook in hooks:
            hook.remove()
