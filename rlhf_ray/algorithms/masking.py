"""Means and whitening over the True tokens of a mask. Values outside the mask, NaN included, have no effect.

Reductions run in float32 at least, so bfloat16 inputs lose nothing in the sum. The mean of nothing is 0, with a graph.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_ray.errors import ConfigError

Aggregate = Literal["token", "sequence"]

WHITEN_EPSILON = 1e-8
"""Added to the variance before its root, so that constant inputs whiten to 0."""


def wide(x: Tensor) -> Tensor:
    """`x` in float32 or wider: half precision and integers become float32, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in float32 or wider where `mask` is True, 0 elsewhere. Gradients outside the mask are exactly 0.

    Apply it to inputs, before any arithmetic: masking a result comes too late for the gradient of a NaN.

    Raises:
        ValueError: the shapes differ (broadcasting a mask by accident would count tokens wrongly).
    """
    if x.shape != mask.shape:
        raise ValueError(f"tensor of shape {tuple(x.shape)} with a mask of shape {tuple(mask.shape)}; they must agree")
    wider = wide(x)
    return torch.where(mask, wider, torch.zeros_like(wider))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over the True entries of `mask`, both of one shape; a scalar, 0 when there are none."""
    return select(x, mask).sum() / mask.sum().clamp(min=1)


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (n-1) of `x` over the True entries of `mask`; a scalar, 0 for fewer than two."""
    squares = select(wide(x) - masked_mean(x, mask), mask).square()
    return squares.sum() / (mask.sum() - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Scale `x` to unit variance (unbiased, n-1) and zero mean over the True entries of `mask`; 0 outside the mask.

    Args:
        x: any shape.
        mask: bool of the same shape.
    """
    centred = select(x, mask) - masked_mean(x, mask)
    return select(centred * torch.rsqrt(masked_variance(x, mask) + WHITEN_EPSILON), mask)


def aggregate_mean(x: Tensor, mask: Tensor, aggregate: Aggregate, row_weights: Tensor | None = None) -> Tensor:
    """Mean over all True tokens ("token"), or mean of the rows' means ("sequence"); a scalar.

    Rows without any True token do not count as rows: adding one changes nothing.

    Args:
        row_weights: `[B]` weights of the rows' means, None for equal ones. If those of each sample's rows add up to 1,
            the result is the mean of the samples' means. Tokens always count equally.
    """
    if aggregate == "token":
        return masked_mean(x, mask)
    rows = select(x, mask).sum(-1) / mask.sum(-1).clamp(min=1)
    total = denominator(mask, aggregate, row_weights)
    return (rows if row_weights is None else rows * row_weights).sum() / total.masked_fill(total == 0, 1)


def denominator(mask: Tensor, aggregate: Aggregate, row_weights: Tensor | None = None) -> Tensor:
    """The divisor of `aggregate_mean`: True tokens, or rows that have any (with weights, their sum). A scalar.

    A micro-batch's share of the loss of a whole batch is `loss * denominator(part) / denominator(whole)`: summed over
    the parts it is the loss of the whole, however the rows were distributed.

    Raises:
        ConfigError: an unknown `aggregate`.
    """
    if aggregate == "token":
        return mask.sum()
    if aggregate == "sequence":
        rows = mask.any(-1)
        return (rows if row_weights is None else rows * row_weights).sum()
    raise ConfigError(f'aggregate={aggregate!r} is unknown; use "token" or "sequence"')
