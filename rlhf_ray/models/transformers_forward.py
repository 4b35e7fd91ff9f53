"""Transformers' own forward pass of a packed module's model on padded rows: the reference for packed passes.

Nothing here uses our attention, our linear layers, or the packed modules' code from hidden states to outputs. Logits
come from the family's own forward pass and so include its soft-caps, logit scales and biases, but only at the compared
positions, since all logits of a long row would be larger than the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_ray.errors import ModelError
from rlhf_ray.internals.torch import uncompiled
from rlhf_ray.internals.transformers import attention_implementation, supports_sdpa
from rlhf_ray.models.cpu.linear import OneDNNLinear
from rlhf_ray.models.float32_head import ConvertedHead, Float32Head
from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel, PackedScalarModel, runs_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_SCORES = 2**26
"""Largest attention scores of one layer, in elements, that are computed by the "eager" implementation, which supports
everything that families add to attention; 256 MiB of float32."""
LARGEST_MASK = 2**26
"""Largest attention mask, in elements, that is passed for a single row, which is causal and does not need one."""

THEIRS: dict[type[nn.Module], type[nn.Module]] = {OneDNNLinear: nn.Linear, Float32Head: ConvertedHead}
"""Layers of the reference, by ours. A head in float32 is computed by its definition."""


@dataclass(frozen=True)
class PaddedRows:
    """Some rows as transformers reads them, and the compared positions."""

    tokens: Tensor
    """[B, L] int64, padded on the right."""
    mask: Tensor | None
    """[B, L] 1 on tokens; None for a single long row."""
    cells: Tensor
    """[t] cell numbers of all tokens in the flattened grid, in the order of the packed rows."""
    compared: Tensor
    """[n] cell numbers of the compared positions."""
    targets: Tensor
    """[n] tokens whose log-probabilities are compared."""

    @classmethod
    def of(cls, rows: list[Tensor], compared: list[Tensor], targets: Tensor, extra: int) -> "PaddedRows":
        """Rows of tokens, padded to the longest row plus `extra`.

        Args:
            compared: the compared positions of each row.
            targets: [n] the target tokens of all of them.
        """
        length = max(map(len, rows)) + extra
        tokens = torch.stack([pad(row, (0, length - len(row))) for row in rows])
        mask = torch.stack([pad(torch.ones_like(row), (0, length - len(row))) for row in rows])
        masked = len(rows) > 1 or length**2 <= LARGEST_MASK
        return cls(tokens, mask if masked else None, mask.flatten().nonzero()[:, 0],
                   torch.cat([i * length + places for i, places in enumerate(compared)]), targets)


def reference_outputs(module: nn.Module, rows: PaddedRows) -> tuple[Tensor, ...]:
    """Columns of [n] numbers at the compared positions, the same that the packed module returns.

    Raises:
        ModelError: the family's forward pass does not call its output head exactly once.
    """
    model: Any = module.model
    if isinstance(module, PackedScalarModel):
        hidden = _states(model.base_model(**_inputs(rows)).last_hidden_state, rows.compared)
        return (_scalars(model.score, hidden),)
    with _head_at_positions(model, rows.compared) as (backbone_states, head_states):
        logits = model(**_inputs(rows)).logits
    if logits.shape[:2] != (1, len(rows.compared)) or len(head_states) != 1:
        raise ModelError(f"the output head of {type(model).__name__} is not called once with all hidden states; "
                         "use a model of a supported family (docs/models.md)")
    distribution = (logits[0].float() / getattr(module, "temperature", 1.0)).log_softmax(-1)
    logprobs = distribution.gather(-1, rows.targets[:, None])[:, 0]
    if not isinstance(module, (PackedLanguageModel, PackedActorCritic)):
        return (logprobs,)
    entropies = -(distribution.exp() * distribution).sum(-1)
    if isinstance(module, PackedLanguageModel):
        return logprobs, entropies
    (states,) = backbone_states or head_states  # OPT's forward pass does not call the backbone as a module
    return logprobs, entropies, _scalars(module.value_head, states)


def _scalars(head: nn.Module, states: Tensor) -> Tensor:
    """[n] outputs of a scalar head, whose weights are float32 also where the model computes in bfloat16."""
    with torch.autocast(states.device.type, enabled=False):
        return head(states.to(head.weight.dtype)).squeeze(-1)


@contextmanager
def transformers_layers(model: "PreTrainedModel", attention: str) -> Iterator[None]:
    """Inside, the model uses transformers' attention and linear layers, and none that is compiled; ours are restored on
    exit."""
    ours, layers = attention_implementation(model), {m: type(m) for m in model.modules() if type(m) in THEIRS}
    try:
        model.set_attn_implementation(attention)
        for layer, kind in layers.items():
            layer.__class__ = THEIRS[kind]
        with uncompiled(model):
            yield
    finally:
        for layer, kind in layers.items():
            layer.__class__ = kind
        model.set_attn_implementation(ours)


def attention_implementation_for(model: "PreTrainedModel", rows: int, tokens: int) -> str:
    """The attention implementation of transformers that supports this family and fits in memory for these rows; for
    models that run on padded rows, their own (Falcon's "eager" adds its ALiBi twice)."""
    if not runs_packed(model):
        return attention_implementation(model)
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 1)
    if rows * heads * tokens**2 <= LARGEST_SCORES or not _is_right_with_sdpa(model):
        return "eager"
    return "sdpa"


def _is_right_with_sdpa(model: "PreTrainedModel") -> bool:
    """Whether "sdpa" computes what the model defines; it ignores soft-caps."""
    return supports_sdpa(model) and not getattr(model.config.get_text_config(), "attn_logit_softcapping", None)


def longest_affordable_row(model: "PreTrainedModel", tokens: int) -> int:
    """The longest row, up to `tokens`, that transformers' own attention computes in bounded memory."""
    if _is_right_with_sdpa(model):
        return tokens
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 1)
    return min(tokens, int((LARGEST_SCORES / heads) ** 0.5))


def _inputs(rows: PaddedRows) -> dict[str, Any]:
    return {"input_ids": rows.tokens, "attention_mask": rows.mask, "use_cache": False}


def _states(hidden: Tensor, cells: Tensor) -> Tensor:
    """[n, hidden] states at these cells of a `[B, L, hidden]` grid."""
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, cells)


@contextmanager
def _head_at_positions(model: Any, cells: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Inside, the output head receives only the states at these cells, as one row. Yields the states there that the
    backbone returns and those that the head receives. Families transform logits element by element, so computing only
    these is equivalent."""
    backbone_states: list[Tensor] = []
    head_states: list[Tensor] = []

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        head_states.append(_states(inputs[0], cells))
        return (head_states[-1][None], *inputs[1:])

    hooks = [model.base_model.register_forward_hook(
                 lambda _, __, output: backbone_states.append(_states(output.last_hidden_state, cells))),
             model.get_output_embeddings().register_forward_pre_hook(select)]
    try:
        yield backbone_states, head_states
    finally:
        for hook in hooks:
            hook.remove()
