"""From one score per response to one reward per token."""

from torch import Tensor, where

from rlhf_ray.algorithms.masking import select, wide
from rlhf_ray.errors import ConfigError


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, clip: float | None = None) -> Tensor:
    """-kl_coef * kl on every response token, plus the score on each row's last one (Ziegler et al. 2019, eq. 2).

    The last response token is the end-of-sequence token where the response ended by itself.

    Args:
        scores: `[B]`. A NaN stays a NaN: a failed reward is no zero.
        kl: `[B, T]` per-token estimates (`kl.approx_kl`).
        mask: `[B, T]` bool, True on response tokens.
        kl_coef: weight of the penalty.
        clip: bounds the scores to ±clip (not the KL); None for no bound.

    Returns:
        `[B, T]` float32 or wider, 0 outside the mask; a row without any True token is all 0.

    Raises:
        ConfigError: clip is not positive.
        ValueError: shapes do not agree.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(f"reward clip {clip} would erase every score; give a positive bound or none")
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores of shape {tuple(scores.shape)} for a mask of shape {tuple(mask.shape)}; one a row")
    scores = wide(scores) if clip is None else wide(scores).clamp(-clip, clip)
    penalties = select(wide(kl) * -kl_coef, mask)
    return where(last_true(mask), penalties + scores[:, None], penalties)


def last_true(mask: Tensor) -> Tensor:
    """`[B, T]` bool with each row's last True alone; nothing in rows without any."""
    true_from_here_on = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (true_from_here_on == 1)
