"""Importance weights: the learner's over the generator's probability of each token, and what leaves tokens out."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from rlhf_ray.algorithms.masking import masked_mean, select
from rlhf_ray.errors import ConfigError

Stats = dict[str, Tensor]
Level = Literal["token", "sequence"]
Importance = Literal["none", "truncate", "mask", "band"]
ResponseMask = Literal["geometric", "outlier"]
Bounds = tuple[float, float]
"""Smallest and largest value that is left in."""

BAND: Bounds = (0.5, 5.0)
"""IcePop (Ring-1T, 2025); suggested by verl and OpenRLHF."""
GEOMETRIC: Bounds = (0.99, 1.01)
"""Suggested by SkyRL."""
OUTLIER: Bounds = (1e-4, 100.0)
"""Suggested by SkyRL."""

MAX_LOG_RATIO = 40.0
"""Log-ratios are cut here before exp: far beyond any clip range, yet exp stays finite, and 0 * exp(x) is no NaN."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio cut at MAX_LOG_RATIO, so that it is finite."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    tokens: Importance = "truncate",
    cap: float | None = None,
    level: Level = "token",
    band: Bounds = BAND,
    masks: Sequence[ResponseMask] = (),
    geometric: Bounds = GEOMETRIC,
    outlier: Bounds = OUTLIER,
) -> tuple[Tensor, Stats]:
    """Weights that correct for tokens sampled with other probabilities than the learner's.

    The weight is w = exp(old - behaviour) of each token, or with level="sequence" the product of a row's, on all its
    tokens: the importance weight of the whole row. It is used as `tokens` says:

    - none: 1 in its place.
    - truncate: above `cap` it becomes cap (Ionides 2008; per token Yao et al. 2025).
    - mask: above `cap` it becomes 0.
    - band: outside `band` it becomes 0 (IcePop, Ring-1T 2025).

    Each of `masks` then makes all weights of some rows 0, whatever `tokens` is. Both judge the tokens' own w:

    - geometric: rows whose geometric mean of w, exp(mean of log w), is outside `geometric` (SkyRL, verl).
    - outlier: rows with a w outside `outlier` (SkyRL).

    A response of several rows is judged row by row, as its ratios and products are: other rows of the same sample may
    be in another micro-batch, or on another rank. Tokens of weight 0 stay in the denominators of losses.

    Args:
        old_logprobs, behaviour_logprobs: `[B, T]` log-probabilities of the sampled tokens under the policy when the
            update began, and under the policy that sampled them.
        mask: `[B, T]` bool.
        cap: for "truncate" and "mask"; None for no cap.

    Returns:
        (weights, stats): `[B, T]`, without graph; is_weight_mean (weights as used), is_capped_fraction (tokens whose
        weight was above the cap, or outside the band) and, with that mask, is_geometric_fraction and
        is_outlier_fraction (tokens of the rows that it leaves out); all over True tokens.

    Raises:
        ConfigError: as `check_importance`.
    """
    check_importance(tokens, level, cap, band, masks, geometric, outlier)
    gap = select(old_logprobs, mask) - select(behaviour_logprobs, mask)
    weights = ratio_of(gap if level == "token" else gap.sum(-1, keepdim=True).expand_as(gap))
    capped = torch.zeros_like(mask)

    # The weights of tokens.
    if tokens == "none":
        weights = torch.ones_like(weights)
    elif tokens == "band":
        capped = _outside(weights, band)
        weights = weights.masked_fill(capped, 0.0)
    elif cap is not None:
        capped = weights > cap
        weights = weights.masked_fill(capped, cap if tokens == "truncate" else 0.0)
    stats = {"is_capped_fraction": masked_mean(capped, mask)}

    # Rows that are left out.
    if "geometric" in masks:
        mean = gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        rows = _outside(ratio_of(mean), geometric).expand_as(mask)
        weights = weights.masked_fill(rows, 0.0)
        stats["is_geometric_fraction"] = masked_mean(rows, mask)
    if "outlier" in masks:
        rows = (_outside(ratio_of(gap), outlier) & mask).any(-1, keepdim=True).expand_as(mask)
        weights = weights.masked_fill(rows, 0.0)
        stats["is_outlier_fraction"] = masked_mean(rows, mask)
    return weights, {"is_weight_mean": masked_mean(weights, mask), **stats}


def _outside(ratios: Tensor, bounds: Bounds) -> Tensor:
    low, high = bounds
    return (ratios < low) | (ratios > high)


def check_importance(
    tokens: Importance, level: Level, cap: float | None, band: Bounds, masks: Sequence[ResponseMask],
    geometric: Bounds, outlier: Bounds,
) -> None:
    """Check settings of the importance weights.

    Raises:
        ConfigError: a cap that is not positive, bounds out of order, an unknown name.
    """
    if tokens not in get_args(Importance):
        raise ConfigError(f'importance={tokens!r} is unknown; use "none", "truncate", "mask" or "band"')
    if level not in get_args(Level):
        raise ConfigError(f'importance level {level!r} is unknown; use "token" or "sequence"')
    if unknown := [name for name in masks if name not in get_args(ResponseMask)]:
        raise ConfigError(f'importance masks {unknown} are unknown; use "geometric" and "outlier"')
    if cap is not None and not cap > 0:
        raise ConfigError(f"is_cap={cap} would erase the loss; use a positive cap (2), or none")
    for name, (low, high) in {"band": band, "geometric": geometric, "outlier": outlier}.items():
        if not 0 < low < high:
            raise ConfigError(f"{name}=({low}, {high}) leaves every weight out; give two positive bounds, the smaller "
                              "one first")
