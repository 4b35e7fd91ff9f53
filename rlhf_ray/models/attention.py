"""Causal attention over packed rows, as an attention implementation of transformers.

Rows must not attend to each other. Instead of a `[T, T]` block-diagonal mask, whose cost grows with the square of the
whole micro-batch, queries, keys and values are laid out as `[N, L]` grids for scaled-dot-product attention and gathered
back, on CPUs and GPUs alike. This costs copies of all four, and attention over N · L² pairs of positions instead of the
rows' own pairs. The difference is small because micro-batches hold rows in order of length and each grid holds only a
few adjacent rows (`Packing.blocks`). All other layers run on real tokens only. No variable-length kernel is used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_ray.errors import ModelError
from rlhf_ray.models.cpu.short_rows import HeadGrids, ShortRowAttention, takes_short_rows
from rlhf_ray.models.packing import Packing

NAME = "rlhf_ray_packed"
NEUTRAL = {
    "position_ids": "rotary embeddings are applied before attention is called",
    "use_cache": "passes over packed rows keep no keys and values",
    "output_attentions": "no pass here requests attention weights",
}
"""Further arguments that transformers families pass to attention, and why they have no effect. Other arguments must be
None, except a `sliding_window` that no row exceeds: `softcap` caps scores, `s_aux` are sinks, `position_bias` is added
to scores, `encoder_hidden_states` belong to another text."""


class _Scatter(torch.autograd.Function):
    """Copy packed rows to a zero grid. The backward pass is a plain copy too; autograd's own would accumulate."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, index: Tensor, size: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        return flat.new_zeros((size, *flat.shape[1:])).index_copy_(0, index, flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """Copy packed rows back from a grid; every cell is read at most once."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.size = grid.shape[0]
        return grid.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.new_zeros((ctx.size, *grad.shape[1:])).index_copy_(0, ctx.saved_tensors[0], grad), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of `[1, heads, T, D]` queries over packed rows; returns `[1, T, heads, D]` as transformers expects.

    Tokens after the last row are filler and get zeros.

    Raises:
        ValueError: there is no `packing`, which only our own forward passes supply.
        ModelError: the model needs another kind of attention; names the family and the argument.
    """
    if packing is None:
        raise ValueError(f"attention {NAME!r} needs packing=Packing(...), which {_family(module)} did not receive "
                         "or does not pass on; use 'sdpa' for padded batches")
    _refuse_other_kinds(module, packing, {"attention_mask": attention_mask, **others})
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if takes_short_rows(q, k, packing, dropout):
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return ShortRowAttention.apply(q, k, v, HeadGrids.of(packing, q.shape[1]), scale)[None], None
    blocks, filler = packing.blocks, len(q) - packing.tokens
    parts = [x.split([*(block.tokens for block in blocks), filler]) for x in (q, k, v)]
    outputs = [_attend(block, q, k, v, dropout, scaling) for block, q, k, v in zip(blocks, *parts, strict=False)]
    if filler:
        outputs.append(outputs[0].new_zeros(filler, *outputs[0].shape[1:]))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _refuse_other_kinds(module: torch.nn.Module, packing: Packing, others: Mapping[str, Any]) -> None:
    """Reject arguments and modules for which causal attention within each row is not what the model computes."""
    unsupported = [name for name, value in others.items() if value is not None and name not in NEUTRAL and not (
        (name == "sliding_window" and packing.longest <= value) or (name == "is_causal" and value))]
    if unsupported:
        name, value = unsupported[0], others[unsupported[0]]
        what = f"{name}={value}" if isinstance(value, int | float | str) else f"{name} (a {type(value).__name__})"
        rows = f", with rows of up to {packing.longest} tokens" if name == "sliding_window" else ""
        raise ModelError(f"{_family(module)} calls attention with {what}{rows}, which packed attention does not "
                         "compute; use a model without it, or rows within the window (see docs/models.md)")
    if getattr(module, "is_causal", True) is False:
        raise ModelError(f"{_family(module)} lets tokens attend to later ones (is_causal=False), which packed "
                         "attention does not; use a causal model (see docs/models.md)")


def _family(module: torch.nn.Module) -> str:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return type(module).__name__ + (f" of the family {kind!r}" if kind else "")


def _attend(
    packing: Packing, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """[T, heads, D] outputs of `[T, heads, D]` queries, keys and values, with all rows in one grid."""
    size = packing.rows * packing.longest
    q, k, v = (
        (x if packing.is_grid else _Scatter.apply(x, packing.grid_index, size))
        .reshape(packing.rows, packing.longest, *x.shape[1:]).transpose(1, 2)
        for x in (query, key, value)
    )
    out = scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    flat = out.transpose(1, 2).reshape(size, *out.shape[1::2])
    return flat if packing.is_grid else _Gather.apply(flat, packing.grid_index)


def register() -> str:
    """Register the implementation with transformers; returns its name. Registering again has no effect."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME
