"""The losses of PPO, of policy and critic: clipped surrogate, ratios and importance weights, clipped value loss.

Losses with statistics return `(loss, stats)`: stats are detached scalar tensors, still on their device, so
that reading them is the caller's choice of when to wait for a GPU.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_ray.algorithms.kl import approx_kl
from rlhf_ray.algorithms.masking import Aggregate, aggregate_mean, masked_mean, select
from rlhf_ray.errors import ConfigError

Stats = dict[str, Tensor]
Level = Literal["token", "sequence"]
Importance = Literal["truncate", "mask"]

MAX_LOG_RATIO = 40.0
"""Log-ratios are cut here before exp: far beyond any clip range, yet exp stays finite, and 0 * exp(x) is no NaN."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    behaviour_logprobs: Tensor | None = None,
    is_cap: float | None = None,
    aggregate: Aggregate = "token",
    ratio: Level = "token",
    importance: Importance = "truncate",
    importance_level: Level = "token",
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated; gradients flow through `logprobs` alone.

    Per token, with r = exp(logprobs - old_logprobs): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)). Where A < 0,
    dual_clip bounds it by -A * dual_clip (Ye et al. 2020, eq. 5). With ratio="sequence", r is the geometric mean of the
    row's ratios (GSPO, Zheng et al. 2025). With `behaviour_logprobs` each token's loss is multiplied by a constant,
    the importance weight of `importance_weights` (decoupled PPO, Hilton et al. 2022).

    Args:
        logprobs, old_logprobs, behaviour_logprobs: `[B, T]` log-probabilities of the sampled tokens, under the policy
            in training, the policy when the update began, and the policy that sampled them.
        advantages: `[B, T]`.
        mask: `[B, T]` bool.
        clip_low, clip_high: the epsilons.
        dual_clip: > 1, or None for no bound.
        is_cap: largest importance weight; None for no cap.
        aggregate: mean over all True tokens, or mean of rows' means (`masking.aggregate_mean`).
        ratio: of each token, or one for all tokens of a row.
        importance: cut weights above is_cap to it ("truncate"), or leave their tokens out of the loss ("mask").
        importance_level: a weight for each token, or one for all tokens of a row.
        row_weights: `[B]`, of the rows' means (`masking.aggregate_mean`).

    Returns:
        (loss, stats): clip_fraction (tokens whose loss the clip changed), approx_kl, approx_kl_k1 and approx_kl_k2 (k3,
        k1 and k2 of old against new, nats a token; k2, half the mean square, is PPO2's), ratio_mean and, with
        behaviour_logprobs, is_weight_mean (weights as used) and is_capped_fraction (tokens whose weight was above
        is_cap); all over True tokens.

    Raises:
        ConfigError: dual_clip of 1 or less, is_cap not positive or without behaviour_logprobs, an unknown name.
    """
    _check_dual_clip(dual_clip)
    check_importance(behaviour_logprobs, is_cap, importance)
    new, old = select(logprobs, mask), select(old_logprobs, mask).detach()
    ratios = policy_ratios(new, old, mask, ratio)
    losses, clipped = _surrogate(ratios, select(advantages, mask).detach(), clip_low, clip_high, dual_clip)
    stats = _policy_stats(new.detach(), old, ratios.detach(), clipped, mask)
    if behaviour_logprobs is not None:
        behaviour = select(behaviour_logprobs, mask).detach()
        weights, capped = importance_weights(old, behaviour, is_cap, importance, importance_level)
        losses = losses * weights
        stats["is_weight_mean"] = masked_mean(weights, mask)
        stats["is_capped_fraction"] = masked_mean(capped, mask)
    return aggregate_mean(losses, mask, aggregate, row_weights), stats


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None,
    aggregate: Aggregate = "token", row_weights: Tensor | None = None,
) -> Tensor:
    """Half the squared error of the critic, clipped around its old values as in PPO2 (OpenAI baselines).

    Per token: 1/2 max((V - R)², (V_old + clamp(V - V_old, ±clip) - R)²).

    Args:
        values, old_values, returns: `[B, T]`; gradients flow through `values` alone.
        mask: `[B, T]` bool.
        clip: > 0, or None for the plain squared error (`old_values` is then unused).
        aggregate, row_weights: as for `policy_loss`.

    Raises:
        ConfigError: clip is not positive, an unknown `aggregate`.
    """
    return 0.5 * aggregate_mean(_value_errors(values, old_values, returns, mask, clip)[1], mask, aggregate, row_weights)


@torch.no_grad()
def value_stats(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None
) -> Stats:
    """Statistics of `value_loss` for the same arguments.

    Returns:
        clip_fraction (tokens whose loss the clip changed), value_mean, error (mean squared error, unclipped and without
        the 1/2); all over True tokens.
    """
    squares, worst = _value_errors(values, old_values, returns, mask, clip)
    return {
        "clip_fraction": masked_mean(worst > squares, mask),
        "value_mean": masked_mean(select(values, mask), mask),
        "error": masked_mean(squares, mask),
    }


def _value_errors(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """`[B, T]` squared errors, and the larger of these and the clipped ones."""
    if clip is not None and not clip > 0:
        raise ConfigError(f"value clip {clip} would freeze the critic; give a positive bound or none")
    values, returns = select(values, mask), select(returns, mask).detach()
    squares = (values - returns).square()
    if clip is None:
        return squares, squares
    old = select(old_values, mask).detach()
    return squares, torch.maximum(squares, (values.clamp(old - clip, old + clip) - returns).square())


def entropy_bonus(entropy: Tensor, mask: Tensor) -> Tensor:
    """Mean entropy over True tokens: *subtract* it from the loss, times a coefficient (Schulman et al. 2017, eq. 9).

    Args:
        entropy: `[B, T]` from `logprobs.entropy`.
        mask: `[B, T]` bool.
    """
    return masked_mean(entropy, mask)


def _surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token loss, and where a clip changed it."""
    plain = -advantages * ratio
    losses = torch.maximum(plain, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return losses, (losses != plain).detach()


def _policy_stats(new: Tensor, old: Tensor, ratio: Tensor, clipped: Tensor, mask: Tensor) -> Stats:
    return {
        "clip_fraction": masked_mean(clipped, mask),
        "approx_kl": masked_mean(approx_kl(old, new, "k3"), mask),
        "approx_kl_k1": masked_mean(approx_kl(old, new, "k1"), mask),
        "approx_kl_k2": masked_mean(approx_kl(old, new, "k2"), mask),
        "ratio_mean": masked_mean(ratio, mask),
    }


def _check_dual_clip(dual_clip: float | None) -> None:
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip={dual_clip} would cut an unchanged policy's loss; use more than 1 (3), or none")


def policy_ratios(new: Tensor, old: Tensor, mask: Tensor, level: Level) -> Tensor:
    """[B, T] exp(new - old) of each token, or of a row on all its tokens, with a gradient to each token.

    All inputs are `[B, T]`, 0 outside `mask`. The row's ratio is s = exp(mean of its log-ratios) (GSPO, Zheng et al.
    2025). Token t gets it as s * pi_t / sg(pi_t) (their GSPO-token): the same value, and the same gradient where all
    advantages of a row are equal, while advantages that differ between tokens keep their own.

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
    """Weights that correct for tokens sampled with other probabilities than the learner's, and where the cap applies.

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
    """Check the cap and the kind of the importance weights.

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
    """exp of the log-ratio cut at MAX_LOG_RATIO, so that it is finite."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
