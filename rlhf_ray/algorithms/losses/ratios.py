"""Ratios of probabilities, of tokens or of whole responses: of the policy to itself before, and to what sampled.

All inputs are `[B, T]` log-probabilities that are 0 outside `mask` (`masking.select`).
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_ray.errors import ConfigError

Level = Literal["token", "sequence"]
Importance = Literal["truncate", "mask"]

MAX_LOG_RATIO = 40.0
"""Log-ratios are cut here before exp: far beyond any clip range, yet exp stays finite, and 0 * exp(x) is no NaN."""


def policy_ratios(new: Tensor, old: Tensor, mask: Tensor, level: Level) -> Tensor:
    """[B, T] exp(new - old) of each token, or of a row on all its tokens, with a gradient to each token.

    The row's ratio is s = exp(mean of its log-ratios) (GSPO, Zheng et al. 2025). It is handed to token t as
    s * pi_t / sg(pi_t) (their GSPO-token): the same value, and the same gradient where all advantages of a row
    are equal, while advantages that differ between tokens keep their own.

    Raises:
        ConfigError: an unknown level.
    """
    if level == "token":
        return _exp(new - old)
    if level != "sequence":
        raise ConfigError(f'ratio={level!r} is unknown; use "token" or "sequence"')
    row = (new.detach() - old).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return _exp(row) * (new - new.detach()).exp()


def importance_weights(
    old: Tensor, behaviour: Tensor, cap: float | None, kind: Importance, level: Level
) -> tuple[Tensor, Tensor]:
    """Weights that make up for tokens drawn by other probabilities than the learner's, and where they pass the cap.

    exp(old - behaviour) of each token, or the product of a row's on all its tokens: the importance weight of the whole
    response. Above `cap` they become cap ("truncate"; Ionides 2008, and per token Yao et al. 2025) or 0 ("mask").

    Returns:
        (weights `[B, T]`, capped `[B, T]` bool).

    Raises:
        ConfigError: an unknown level.
    """
    gap = old - behaviour
    if level == "sequence":
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
    elif level != "token":
        raise ConfigError(f'importance level {level!r} is unknown; use "token" or "sequence"')
    weights = _exp(gap)
    if cap is None:
        return weights, torch.zeros_like(gap, dtype=torch.bool)
    capped = weights > cap
    return torch.where(capped, cap if kind == "truncate" else 0.0, weights), capped


def check_importance(behaviour_logprobs: Tensor | None, cap: float | None, kind: Importance) -> None:
    """Refuse caps that make no sense.

    Raises:
        ConfigError: a cap that is not positive or has nothing to cap; an unknown kind.
    """
    if kind not in ("truncate", "mask"):
        raise ConfigError(f'importance={kind!r} is unknown; use "truncate" or "mask"')
    if cap is not None and not cap > 0:
        raise ConfigError(f"is_cap={cap} would erase the loss; use a positive cap (2), or none")
    if cap is not None and behaviour_logprobs is None:
        raise ConfigError(f"is_cap={cap} caps weights that need behaviour_logprobs; pass them, or no cap")


def _exp(log_ratio: Tensor) -> Tensor:
    """Its exponential, finite whatever the gap."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
