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

from rlhf_ray.errors import ModelError
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.short_row_attention import LONGEST, HeadGrids, ShortRowAttention

NAME = "rlhf_ray_packed"
NEUTRAL = {
    "position_ids": "queries and keys are turned by their positions before they come here",
    "use_cache": "no pass over packed rows keeps keys and values",
    "output_attentions": "no pass here asks for attention's weights",
}
"""What families of transformers hand to attention besides, and why it changes nothing. Of other arguments only None is
taken, and `sliding_window` where no row is longer: `softcap` caps scores, `s_aux` are sinks, `position_bias` is added
to scores, `encoder_hidden_states` are another text's."""


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of `[1, heads, T, D]` queries over packed rows; returns `[1, T, heads, D]` as transformers expects.

    Tokens behind the last row belong to none and get zeros.

    Raises:
        ValueError: called without a `packing`, which only our own forward passes give.
        ModelError: the model asks for attention of another kind; names the family, the argument and what to do.
    """
    if packing is None:
        raise ValueError(f"attention {NAME!r} needs packing=Packing(...), which {_family(module)} was not given or "
                         "does not pass on; use 'sdpa' for padded batches")
    _refuse_other_kinds(module, packing, {"attention_mask": attention_mask, **others})
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


def _refuse_other_kinds(module: torch.nn.Module, packing: Packing, others: Mapping[str, Any]) -> None:
    """Refuse arguments, and modules, for which causal attention within each row is not what the model computes."""
    asked = [name for name, value in others.items() if value is not None and name not in NEUTRAL and not (
        (name == "sliding_window" and packing.longest <= value) or (name == "is_causal" and value))]
    if asked:
        name, value = asked[0], others[asked[0]]
        what = f"{name}={value}" if isinstance(value, int | float | str) else f"{name} (a {type(value).__name__})"
        rows = f", with rows of up to {packing.longest} tokens" if name == "sliding_window" else ""
        raise ModelError(f"{_family(module)} calls attention with {what}{rows}, which packed attention does not "
                         "compute; take a model without it, or rows within the window (see docs/models.md)")
    if getattr(module, "is_causal", True) is False:
        raise ModelError(f"{_family(module)} lets tokens attend to later ones (is_causal=False), which packed "
                         "attention does not; take a causal model (see docs/models.md)")


def _family(module: torch.nn.Module) -> str:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return type(module).__name__ + (f" of the family {kind!r}" if kind else "")


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


def register() -> str:
    """Make the implementation known to transformers; returns its name. Registering again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
    return NAME
