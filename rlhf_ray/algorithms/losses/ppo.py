"""The losses of PPO, of policy and critic: clipped surrogate, CISPO, ratios, KL penalty, clipped value loss.

Losses with statistics return `(loss, stats)`: stats are detached scalar tensors, still on their device, so
that reading them is the caller's choice of when to wait for a GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_ray.algorithms.kl import Estimator, approx_kl
from rlhf_ray.algorithms.losses.importance import (
    BAND,
    GEOMETRIC,
    OUTLIER,
    Bounds,
    Importance,
    Level,
    ResponseMask,
    Stats,
    check_importance,
    importance_weights,
    ratio_of,
)
from rlhf_ray.algorithms.masking import Aggregate, aggregate_mean, masked_mean, select
from rlhf_ray.errors import ConfigError


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
    band: Bounds = BAND,
    masks: Sequence[ResponseMask] = (),
    geometric: Bounds = GEOMETRIC,
    outlier: Bounds = OUTLIER,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated; gradients flow through `logprobs` alone.

    Per token, with r = exp(logprobs - old_logprobs): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)). Where A < 0,
    dual_clip bounds it by -A * dual_clip (Ye et al. 2020, eq. 5). With ratio="sequence", r is the geometric mean of the
    row's ratios (GSPO, Zheng et al. 2025). With `behaviour_logprobs` each token's loss is multiplied by a constant,
    the importance weight of `importance_weights` (decoupled PPO, Hilton et al. 2022). Tokens whose weight is 0 still
    count in the mean.

    Args:
        logprobs, old_logprobs, behaviour_logprobs: `[B, T]` log-probabilities of the sampled tokens, under the policy
            in training, the policy when the update began, and the policy that sampled them.
        advantages: `[B, T]`.
        mask: `[B, T]` bool.
        clip_low, clip_high: the epsilons.
        dual_clip: > 1, or None for no bound.
        is_cap: largest importance weight, for "truncate" and "mask"; None for no cap.
        aggregate: mean over all True tokens, or mean of rows' means (`masking.aggregate_mean`).
        ratio: of each token, or one for all tokens of a row.
        importance: cut weights above is_cap to it ("truncate"), or leave their tokens out of the loss ("mask"), or
            those of weights outside `band` ("band"); "none" weighs tokens equally.
        importance_level: a weight for each token, or one for all tokens of a row.
        row_weights: `[B]`, of the rows' means (`masking.aggregate_mean`).
        band, masks, geometric, outlier: as for `importance_weights`.

    Returns:
        (loss, stats): clip_fraction (tokens whose loss the clip changed), approx_kl, approx_kl_k1 and approx_kl_k2 (k3,
        k1 and k2 of old against new, nats a token; k2, half the mean square, is PPO2's), ratio_mean and, with
        behaviour_logprobs, those of `importance_weights`; all over True tokens.

    Raises:
        ConfigError: dual_clip of 1 or less, is_cap not positive, is_cap or masks without behaviour_logprobs, bounds out
            of order, an unknown name.
    """
    _check_dual_clip(dual_clip)
    check_importance(importance, importance_level, is_cap, band, masks, geometric, outlier)
    if behaviour_logprobs is None and (is_cap is not None or masks):
        asked = f"is_cap={is_cap}" if is_cap is not None else f"masks={list(masks)}"
        raise ConfigError(f"{asked} applies to weights that need behaviour_logprobs; pass them, or leave it out")
    new, old = select(logprobs, mask), select(old_logprobs, mask).detach()
    ratios = policy_ratios(new, old, mask, ratio)
    losses, clipped = _surrogate(ratios, select(advantages, mask).detach(), clip_low, clip_high, dual_clip)
    stats = _policy_stats(new.detach(), old, ratios.detach(), clipped, mask)
    if behaviour_logprobs is not None:
        weights, of_weights = importance_weights(
            old, behaviour_logprobs, mask, importance, is_cap, importance_level, band, masks, geometric, outlier)
        losses = losses * weights
        stats |= of_weights
    return aggregate_mean(losses, mask, aggregate, row_weights), stats


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    max_ratio: float = 5.0,
    min_ratio: float = 0.0,
    aggregate: Aggregate = "token",
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """CISPO (MiniMax-M1, Chen et al. 2025, eq. 4 and 5): the log-likelihood weighted by a clipped ratio.

    Per token, with r = exp(logprobs - old_logprobs): -sg(clip(r, min_ratio, max_ratio)) A logprobs, where sg stops the
    gradient. Where PPO's clip removes a token's gradient, here only its size is bounded. The bounds are ratios, not
    distances from 1; ScaleRL (Khatri et al. 2025) recommends a maximum from 4 to 8 and no minimum.

    Args:
        logprobs, old_logprobs: `[B, T]` log-probabilities of the sampled tokens under the policy in training and under
            the one that the ratio is to: where samples are stale, the policy that sampled them.
        advantages: `[B, T]`.
        mask: `[B, T]` bool.
        aggregate, row_weights: as for `policy_loss`.

    Returns:
        (loss, stats): clip_fraction (tokens whose ratio was clipped), approx_kl, approx_kl_k1, approx_kl_k2 and
        ratio_mean (before the clip), as for `policy_loss`.

    Raises:
        ConfigError: bounds out of order, or a negative one; an unknown `aggregate`.
    """
    if not 0 <= min_ratio < max_ratio:
        raise ConfigError(f"min_ratio={min_ratio}, max_ratio={max_ratio}: ratios are positive, and the minimum is less "
                          "than the maximum; use 0 and 5")
    new, old = select(logprobs, mask), select(old_logprobs, mask).detach()
    ratios = ratio_of(new.detach() - old)
    weights = ratios.clamp(min_ratio, max_ratio)
    losses = -weights * select(advantages, mask).detach() * new
    return aggregate_mean(losses, mask, aggregate, row_weights), _policy_stats(
        new.detach(), old, ratios, weights != ratios, mask)


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator, old_logprobs: Tensor | None = None
) -> Tensor:
    """Per-token KL penalty for the policy's loss, `kl.approx_kl` with a graph; times the ratio if `old_logprobs` are
    given.

    The mean of a KL estimator over samples of the policy is the KL, but the mean of its gradient is not the KL's
    gradient: the samples' distribution moves, too. Times r = exp(logprobs - old_logprobs), which carries a gradient and
    is 1 where both are equal, the mean over samples of the *old* policy is that of the estimator under the policy in
    training, and so is its gradient: that of the reverse KL for k1 and k3 (DeepSeek-V3.2, 2025, section 3.1; TRL 1.16,
    `use_bias_correction_kl`). For k2 and abs it is the gradient of the means of (log-ratio)² / 2 and |log-ratio|.

    The ratio is each token's own: the states before a token are those that the old policy reached.

    Args:
        logprobs, ref_logprobs, old_logprobs: `[B, T]`; gradients flow through `logprobs` alone.
        mask: `[B, T]` bool.

    Returns:
        `[B, T]`, 0 outside the mask.

    Raises:
        ConfigError: an unknown estimator.
    """
    new = select(logprobs, mask)
    kl = approx_kl(new, select(ref_logprobs, mask).detach(), estimator)
    return kl if old_logprobs is None else ratio_of(new - select(old_logprobs, mask).detach()) * kl


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
        return ratio_of(new - old)
    if level != "sequence":
        raise ConfigError(f'ratio={level!r} is unknown; use "token" or "sequence"')
    row = (new.detach() - old).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return ratio_of(row) * (new - new.detach()).exp()
