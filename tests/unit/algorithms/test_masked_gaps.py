"""Gaps inside a response (tokens the policy did not sample) are skipped: every number is that of the rows cut out.

Rows with gaps and the same rows compacted must give the same losses, gradients and advantages. What stands in a gap,
NaN included, must not matter.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.advantage_estimators import ScoredResponses, estimate, token_rewards
from rlhf_ray.algorithms.advantages import discounted_returns, gae
from rlhf_ray.algorithms.kl import approx_kl
from rlhf_ray.algorithms.losses import entropy_bonus, policy_loss, value_loss, value_stats
from rlhf_ray.algorithms.masking import aggregate_mean, masked_mean, masked_whiten, select

NAN = float("nan")
AGGREGATES = ["token", "sequence"]


def gapped(seed, rows, length):
    """`[rows, length]` float64 columns a to e and a mask with gaps; every row has a True token."""
    g = torch.Generator().manual_seed(seed)
    columns = torch.randn(5, rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < 0.6
    mask[torch.arange(rows), torch.randint(0, length, (rows,), generator=g)] = True
    return columns, mask


def compact(x, mask):
    """The True tokens of each row at its beginning, 0 behind them."""
    order = (~mask).int().argsort(dim=-1, stable=True)
    return x.gather(-1, order).masked_fill(~mask.gather(-1, order), 0)


def spread(x, mask):
    """The inverse of `compact`: 0 in the gaps."""
    order = (~mask).int().argsort(dim=-1, stable=True)
    return torch.zeros_like(x).scatter(-1, order, x).masked_fill(~mask, 0)


def both_ways(seed, rows, length):
    """((columns with NaN in the gaps, mask), (columns without gaps, mask))."""
    columns, mask = gapped(seed, rows, length)
    short = compact(mask, mask)
    return (columns.masked_fill(~mask, NAN), mask), (torch.stack([compact(c, mask) for c in columns]), short)


shapes = given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), length=st.integers(1, 7))


def assert_same_loss(loss, long, short, mask):
    """The same value, and the same gradient at the tokens; none in the gaps."""
    (columns, with_gaps), (compacted, without) = long, short
    ends = []
    for values, where in ((columns, with_gaps), (compacted, without)):
        first = values[0].clone().requires_grad_()
        result = loss(first, *values[1:], where)
        result.backward()
        ends.append((result.detach(), first.grad))
    torch.testing.assert_close(ends[0][0], ends[1][0])
    torch.testing.assert_close(ends[0][1], spread(ends[1][1], mask))


@settings(deadline=None, max_examples=15)
@shapes
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("options", [
    {}, {"ratio": "sequence"}, {"importance_level": "sequence", "is_cap": 1.5}, {"importance": "mask", "is_cap": 1.5},
], ids=str)
def test_policy_loss(aggregate, options, seed, rows, length):
    long, short = both_ways(seed, rows, length)

    def loss(new, old, advantages, behaviour, _, mask):
        weighed = {"behaviour_logprobs": behaviour} if set(options) & {"is_cap"} else {}
        return policy_loss(new, old, advantages, mask, 0.2, 0.3, 1.5, aggregate=aggregate, **weighed, **options)[0]

    assert_same_loss(loss, long, short, long[1])


@settings(deadline=None, max_examples=15)
@shapes
def test_value_loss_entropy_and_kl(seed, rows, length):
    long, short = both_ways(seed, rows, length)
    for loss in (
        lambda v, old, returns, _, __, mask: value_loss(v, old, returns, mask, 0.2),
        lambda h, _, __, ___, ____, mask: entropy_bonus(h, mask),
        # It takes no mask: as everywhere, what is outside is set to 0 before any arithmetic.
        *(lambda x, ref, _, __, ___, m, e=e, a=a: aggregate_mean(approx_kl(select(x, m), select(ref, m), e), m, a)
          for e in ("k1", "k2", "k3", "abs") for a in AGGREGATES),
    ):
        assert_same_loss(loss, long, short, long[1])
    stats = [value_stats(*columns[:3], mask, 0.2) for columns, mask in (long, short)]
    assert {name: float(value) for name, value in stats[0].items()} == pytest.approx(
        {name: float(value) for name, value in stats[1].items()})


@settings(deadline=None, max_examples=15)
@shapes
def test_advantages_returns_rewards_and_whitening(seed, rows, length):
    long, short = both_ways(seed, rows, length)
    found = []
    for (a, b, c, *_), mask in (long, short):
        scores = torch.arange(rows, dtype=torch.float64)
        found.append([*gae(a, b, mask, 0.9, 0.8), discounted_returns(a, mask, 0.9), masked_whiten(c, mask),
                      token_rewards(scores, c, mask, 0.1)])
    for with_gaps, without in zip(*found, strict=True):
        torch.testing.assert_close(with_gaps, spread(without, long[1]))


@settings(deadline=None, max_examples=15)
@shapes
@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_pp", "reinforce_baseline", "rloo", "grpo",
                                       "dr_grpo"])
def test_estimators(estimator, seed, rows, length):
    long, short = both_ways(seed, 2 * rows, length)
    found = []
    for (a, b, *_), mask in (long, short):
        penalties = a.masked_fill(~mask, 0) if estimator != "gae" else a
        found.append(estimate(estimator, ScoredResponses(
            scores=torch.arange(2 * rows, dtype=torch.float64), penalties=penalties, mask=mask,
            groups=torch.arange(2 * rows) // 2, values=b if estimator == "gae" else None, gamma=0.9, lam=0.8,
            critic_lam=None)))
    for with_gaps, without in zip(*found, strict=True):
        torch.testing.assert_close(with_gaps, spread(without, long[1]))
    assert float(masked_mean(found[0][0], long[1])) == pytest.approx(float(masked_mean(found[1][0], short[1])))
