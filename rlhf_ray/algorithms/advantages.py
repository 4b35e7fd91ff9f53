"""Advantages and returns: per token with a critic, per sample from the other samples of its group."""

from typing import Literal

import torch
from torch import Tensor

from rlhf_ray.algorithms.masking import select, wide
from rlhf_ray.errors import ConfigError

GroupKind = Literal["rloo", "grpo", "dr_grpo", "mean"]

GRPO_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""
GDPO_EPSILON = 1e-4
"""The same for each reward of GDPO; TRL 1.16 (verl 0.9 and NeMo-RL 0.7: 1e-6)."""


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), over the True tokens of each row alone.

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next, where "next" is the row's next True
    token and both are 0 after the last one. Gaps inside a response (tool output) are thus skipped undiscounted: the
    result is that of the row with its gaps cut out. Values outside the mask, NaN included, are ignored.

    Args:
        rewards, values: `[B, T]`; `values[:, t]` is of the state before token t.
        mask: `[B, T]` bool, True on response tokens.
        gamma: discount per response token.
        lam: GAE's lambda, of all rows or `[B]` of each.

    Returns:
        (advantages, returns): `[B, T]` float32 or wider, without graph, not whitened, returns = advantages + values,
        both 0 outside the mask.
    """
    rewards, values = select(rewards, mask), select(values, mask)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(mask.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
        advantages[:, t] = torch.where(here, advantage, 0.0)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Rewards from each True token on, discounted by `gamma` per True token; gaps are skipped as in `gae`.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]` bool.

    Returns:
        `[B, T]` float32 or wider, without graph, 0 outside the mask.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[1]


@torch.no_grad()
def group_advantages(scores: Tensor, groups: Tensor, kind: GroupKind = "rloo") -> Tensor:
    """Each sample's score relative to the samples of its group (usually those of its prompt).

    rloo: score minus the mean of the *other* samples (Kool et al. 2019; Ahmadian et al. 2024).
    mean: score minus the group's mean, itself included: REINFORCE with a group baseline.
    dr_grpo: the same number as "mean", by the name of its paper (Liu et al. 2025), which leaves the deviation out.
    grpo: "mean" divided by the group's standard deviation (n-1) + 1e-6 (Shao et al. 2024); a group of one gets 0.

    Args:
        scores: `[B]`.
        groups: `[B]` integers: samples with equal numbers form a group, in any order.

    Returns:
        `[B]` float32 or wider, without graph.

    Raises:
        ConfigError: an unknown kind, or "rloo" with a group of one, which has no others to compare with.
    """
    labels, member = torch.unique(groups, return_inverse=True)
    # float64: with equal scores, float32 rounding of the mean divided by 1e-6 would look like an advantage.
    exact = scores.double()
    counts = torch.bincount(member, minlength=len(labels))
    centred = exact - (_group_sums(exact, member, counts) / counts)[member]
    if kind == "rloo":
        _require_groups_of_two(labels, counts)
        centred *= (counts / (counts - 1))[member]  # s - (sum - s) / (n-1) = (s - mean) * n / (n-1)
    elif kind == "grpo":
        variances = _group_sums(centred.square(), member, counts) / (counts - 1).clamp(min=1)
        centred /= variances.sqrt()[member] + GRPO_EPSILON
    elif kind not in ("dr_grpo", "mean"):
        raise ConfigError(f'group advantages of kind {kind!r} are unknown; use "rloo", "grpo", "dr_grpo" or "mean"')
    return centred.to(wide(scores).dtype)


@torch.no_grad()
def gdpo_advantages(rewards: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """GDPO (Liu et al. 2026, arXiv:2601.05242, eq. 4 and 5): each reward compared within its group, then summed.

    sum over k of w_k (r_k - mean) / (std + 1e-4), with mean and standard deviation (n-1) of reward k over the group. A
    reward that is equal in a whole group adds 0 there, and so does every reward in a group of one. The paper whitens
    the sum over the batch afterwards; that is the caller's, as for every estimator.

    Args:
        rewards: `[S, K]` of each sample, before their weights.
        groups: `[S]` integers: samples with equal numbers form a group, in any order.
        weights: `[K]`.

    Returns:
        `[S]` float32 or wider, without graph.

    Raises:
        ValueError: shapes do not agree.
    """
    if rewards.ndim != 2 or groups.shape != rewards.shape[:1] or weights.shape != rewards.shape[1:]:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} with groups of {tuple(groups.shape)} and weights of "
                         f"{tuple(weights.shape)}; they must be [S, K], [S] and [K]")
    labels, member = torch.unique(groups, return_inverse=True)
    exact = rewards.double()  # as in `group_advantages`
    counts = torch.bincount(member, minlength=len(labels))[:, None]
    centred = exact - (_group_sums(exact, member, counts) / counts)[member]
    variances = _group_sums(centred.square(), member, counts) / (counts - 1).clamp(min=1)
    compared = centred / (variances.sqrt()[member] + GDPO_EPSILON)
    return (compared * weights.to(compared)).sum(-1).to(wide(rewards).dtype)


def _group_sums(x: Tensor, member: Tensor, counts: Tensor) -> Tensor:
    """`[G, ...]` sums of `x` `[B, ...]` over the groups that `member` `[B]` points at."""
    return x.new_zeros(len(counts), *x.shape[1:]).index_add_(0, member, x)


def _require_groups_of_two(labels: Tensor, counts: Tensor) -> None:
    alone = labels[counts == 1].tolist()
    if alone:
        raise ConfigError(
            f"leave-one-out needs two samples of each prompt at least, but {len(alone)} groups have one (first: "
            f"{alone[:5]}); raise coordinator.samples_per_prompt or choose another estimator"
        )
