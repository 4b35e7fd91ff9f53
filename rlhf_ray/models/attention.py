"""Causal attention over packed rows, as an attention implementation of transformers.

Rows must not see each other. Instead of a `[T, T]` block-diagonal mask, whose cost grows with the square of the whole
micro-batch, queries, keys and values are laid out as `[N, L]` grids for scaled-dot-product attention and taken back, on
CPUs and GPUs alike. That costs copies of all four, and attention over N · L² pairs of positions instead of the rows'
own; grids hold some neighbouring rows each (`Packing.blocks`), and micro-batches rows in order of length, which keeps
the difference small. Every other layer runs on real tokens alone. A variable-length kernel would do without grids; none
is used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_ray.models.packing import Packing
from rlhf_ray.models.short_rows import LONGEST, HeadGrids, ShortRowAttention

NAME = "rlhf_ray_packed"


class _Scatter(torch.autograd.Function):
    """Lay packed rows out on a zero grid. Both ways are plain copies; autograd's own backward would accumulate."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, index: Tensor, size: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        return flat.new_zeros((size, *flat.shape[1:])).index_copy_(0, index, flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """Take packed rows back from a grid; every place is read at most once."""

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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `[1, heads, T, D]` queries over packed rows; returns `[1, T, heads, D]` as transformers expects.

    Tokens behind the last row belong to none and get zeros.

    Raises:
        ValueError: called without a `packing`, which only our own forward passes give.
    """
    if packing is None:
        raise ValueError(f"attention {NAME!r} needs packing=Packing(...); use 'sdpa' for padded batches")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if _by_products(q, k, packing, dropout):
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return ShortRowAttention.apply(q, k, v, HeadGrids.of(packing, q.shape[1]), scale)[None], None
    blocks, filler = packing.blocks, len(q) - packing.tokens
    parts = [x.split([*(block.tokens for block in blocks), filler]) for x in (q, k, v)]
    answers = [_attend(block, q, k, v, dropout, scaling) for block, q, k, v in zip(blocks, *parts, strict=False)]
    if filler:
        answers.append(answers[0].new_zeros(filler, *answers[0].shape[1:]))
    return (answers[0] if len(answers) == 1 else torch.cat(answers))[None], None


def _by_products(query: Tensor, key: Tensor, packing: Packing, dropout: float) -> bool:
    """Whether `ShortRowAttention` is for these: as many keys' heads as queries', and nothing to drop."""
    return (query.is_cpu and query.dtype in (torch.float32, torch.float64) and packing.longest <= LONGEST
            and query.shape[1] == key.shape[1] and not dropout and not torch.is_autocast_enabled("cpu"))


def _attend(
    packing: Packing, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """[T, heads, D] from `[T, heads, D]` columns of rows that are laid out as one grid."""
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


def local_window(shape: Mapping[str, Any]) -> int | None:
    """Tokens that layers with local attention look back, by a model's configuration; None where no layer has any.

    `packed_attention` sees whole rows: rows longer than the window would be read otherwise than the model does.
    """
    local = "sliding_attention" in (shape.get("layer_types") or ["sliding_attention"])
    return shape.get("sliding_window") if local and shape.get("use_sliding_window", True) else None


def register() -> str:
    """Make the implementation known to transformers; returns its name. Registering again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME
