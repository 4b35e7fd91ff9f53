"""Advantages by hand on a few tokens, and the laws they obey on any."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.advantages import discounted_returns, gae, gdpo_advantages, group_advantages
from rlhf_ray.errors import ConfigError

NAN = float("nan")
ROW = torch.tensor([[True, True, True]])

batches = given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    length=st.integers(1, 7),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)
quick = settings(deadline=None, max_examples=60)


def random_batch(seed, rows, length):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, length, generator=g, dtype=torch.float64)
    return rewards, values, torch.rand(rows, length, generator=g) < 0.6


def test_gae_by_hand():
    rewards, values = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    advantages, returns = gae(rewards, values, ROW, gamma=0.5, lam=0.5)
    # delta: 0 + 0.5*2 - 1 = 0;  1 + 0.5*4 - 2 = 1;  2 + 0 - 4 = -2.  gamma * lam = 0.25
    # A_3 = -2;  A_2 = 1 + 0.25 * -2 = 0.5;  A_1 = 0 + 0.25 * 0.5 = 0.125
    assert advantages.tolist() == [[0.125, 0.5, -2.0]]
    assert returns.tolist() == [[1.125, 2.5, 2.0]]


def test_gae_carries_value_and_advantage_across_a_gap_undiscounted():
    mask = torch.tensor([[False, True, False, False, True, True, False]])
    rewards = torch.tensor([[9.0, 0.0, 9.0, NAN, 1.0, 2.0, 9.0]])
    values = torch.tensor([[NAN, 1.0, NAN, 7.0, 2.0, 4.0, NAN]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.0, 0.125, 0.0, 0.0, 0.5, -2.0, 0.0]]  # the numbers of the row above
    assert returns.tolist() == [[0.0, 1.125, 0.0, 0.0, 2.5, 2.0, 0.0]]


def test_gae_is_not_whitened_and_keeps_no_graph():
    values = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
    advantages, returns = gae(torch.tensor([[0.0, 1.0, 2.0]]), values, ROW, 1.0, 1.0)
    assert advantages.tolist() == [[2.0, 1.0, -2.0]]  # 3 - 1, 3 - 2, 2 - 4
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_gae_of_nothing():
    empty = torch.zeros(2, 3, dtype=torch.bool)
    advantages, returns = gae(torch.full((2, 3), NAN), torch.full((2, 3), NAN), empty, 1.0, 0.95)
    assert advantages.abs().sum() == returns.abs().sum() == 0
    assert gae(torch.zeros(2, 0), torch.zeros(2, 0), empty[:, :0], 1.0, 0.95)[0].shape == (2, 0)


def test_gae_of_bfloat16_is_computed_in_float32():
    advantages, _ = gae(torch.ones(1, 3).bfloat16(), torch.ones(1, 3).bfloat16(), ROW, 1.0, 0.95)
    assert advantages.dtype == torch.float32


@quick
@batches
def test_gapped_rows_equal_compacted_rows(seed, rows, length, gamma, lam):
    rewards, values, mask = random_batch(seed, rows, length)
    advantages, returns = gae(rewards, values.masked_fill(~mask, NAN), mask, gamma, lam)
    for i, keep in enumerate(mask):
        whole = torch.ones(1, int(keep.sum()), dtype=torch.bool)
        alone, its_returns = gae(rewards[i, keep][None], values[i, keep][None], whole, gamma, lam)
        torch.testing.assert_close(advantages[i, keep], alone[0])
        torch.testing.assert_close(returns[i, keep], its_returns[0])
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


@quick
@batches
def test_padding_and_batch_order_change_nothing(seed, rows, length, gamma, lam):
    rewards, values, mask = random_batch(seed, rows, length)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    garbage, nothing = torch.full((rows, 2), NAN).double(), torch.zeros(rows, 2, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    padded = [torch.cat(p, 1)[order] for p in ([garbage, rewards, garbage], [garbage, values, garbage])]
    padded_advantages, padded_returns = gae(*padded, torch.cat([nothing, mask, nothing], 1)[order], gamma, lam)
    assert torch.equal(padded_advantages[:, 2:-2], advantages[order])
    assert torch.equal(padded_returns[:, 2:-2], returns[order])


@quick
@batches
def test_without_discount_and_lambda_gae_is_return_minus_value(seed, rows, length, gamma, lam):
    rewards, values, mask = random_batch(seed, rows, length)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    expected = discounted_returns(rewards, mask, 1.0)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, (expected - values) * mask)


def test_discounted_returns_by_hand():
    mask = torch.tensor([[True, False, True, True, False]])
    rewards = torch.tensor([[1.0, NAN, 2.0, 4.0, NAN]])
    # 4;  2 + 0.5 * 4 = 4;  the gap is skipped: 1 + 0.5 * 4 = 3
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0, 0.0]]


SCORES, GROUPS = torch.tensor([1.0, 10.0, 2.0, 6.0, 20.0]), torch.tensor([7, 3, 7, 7, 3])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # group 7: 1, 2, 6 (mean 3, deviations -2 -1 3, variance 14 / 2 = 7); group 3: 10, 20 (mean 15, variance 50)
        ("rloo", [-3.0, -10.0, -1.5, 4.5, 10.0]),  # 1 - 8/2; 10 - 20; 2 - 7/2; 6 - 3/2; 20 - 10
        ("mean", [-2.0, -5.0, -1.0, 3.0, 5.0]),
        ("dr_grpo", [-2.0, -5.0, -1.0, 3.0, 5.0]),
        ("grpo", [-2 / 7**0.5, -5 / 50**0.5, -1 / 7**0.5, 3 / 7**0.5, 5 / 50**0.5]),
    ],
)
def test_group_advantages_by_hand(kind, expected):
    torch.testing.assert_close(group_advantages(SCORES, GROUPS, kind), torch.tensor(expected), rtol=2e-6, atol=0)


def test_grpo_adds_its_epsilon_to_the_deviation():
    tiny = torch.tensor([0.0, 2e-6], dtype=torch.float64)  # deviations ∓1e-6, variance 2e-12, deviation 1.41421e-6
    expected = 1e-6 / (2**0.5 * 1e-6 + 1e-6)  # 0.41421; without the epsilon 0.70711
    assert group_advantages(tiny, torch.tensor([0, 0]), "grpo")[1].item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "mean", "rloo"])
def test_equal_scores_have_no_advantage(kind):
    advantages = group_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64), kind)
    assert advantages.abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "mean"])
def test_a_group_of_one_has_no_advantage(kind):
    assert group_advantages(torch.tensor([5.0]), torch.tensor([0]), kind).tolist() == [0.0]


def test_leave_one_out_needs_company():
    with pytest.raises(ConfigError, match=r"1 groups have one \(first: \[9\]\).*samples_per_prompt"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 9, 4]), "rloo")


def test_unknown_kind_is_named():
    with pytest.raises(ConfigError, match="'median'"):
        group_advantages(SCORES, GROUPS, "median")


@quick
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["rloo", "grpo", "dr_grpo", "mean"]))
def test_sample_order_and_other_groups_change_nothing(seed, kind):
    g = torch.Generator().manual_seed(seed)
    scores, groups = torch.randn(12, generator=g), torch.tensor([0, 1, 2]).repeat(4)
    order = torch.randperm(12, generator=g)
    advantages = group_advantages(scores, groups, kind)
    torch.testing.assert_close(group_advantages(scores[order], groups[order], kind), advantages[order])
    own = groups == 1
    torch.testing.assert_close(group_advantages(scores[own], groups[own], kind), advantages[own])


def test_gdpo_by_hand():
    rewards = torch.tensor([[1.0, 10.0], [5.0, 7.0], [3.0, 30.0], [5.0, 7.0]])
    groups = torch.tensor([4, 9, 4, 9])
    # group 4: means 2 and 20, deviations (n-1) sqrt(2) and sqrt(200); group 9 is constant in both rewards
    first, second = 1 / (2**0.5 + 1e-4), 10 / (200**0.5 + 1e-4)
    advantages = gdpo_advantages(rewards, groups, torch.tensor([1.0, 0.25]))
    assert advantages.tolist() == pytest.approx([-first - 0.25 * second, 0, first + 0.25 * second, 0], rel=1e-6)


def test_gdpo_is_trls_sum_before_it_is_whitened():
    """`reward_k` times weights, summed: trl 1.16.0, trl/trainer/grpo_trainer.py, lines 2791 to 2796, run in float32."""
    first = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    second = [0.2, 0.9, 0.4, 0.7, 0.3, 0.3, 0.8, 0.1]
    advantages = gdpo_advantages(torch.tensor([first, second]).T, torch.arange(8) // 4, torch.tensor([1.0, 0.5]))
    assert advantages.tolist() == pytest.approx([0.3031972, -0.3031973, 0.6247276, -0.6247277, -0.1255407, -0.1255407,
                                                 0.7113973, -0.4603160], abs=1e-6)


def test_gdpo_sees_a_difference_that_a_weighted_sum_hides():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    scaled = rewards * torch.tensor([100.0, 1.0])
    groups, weights = torch.zeros(4, dtype=torch.long), torch.ones(2)
    torch.testing.assert_close(gdpo_advantages(scaled, groups, weights), gdpo_advantages(rewards, groups, weights),
                               rtol=0, atol=1e-3)


def test_gdpo_of_a_group_of_one_and_of_equal_rewards_is_exactly_zero():
    rewards = torch.tensor([[0.1, 3.3], [0.7, 0.2], [0.7, 0.2], [0.7, 0.2]])
    assert gdpo_advantages(rewards, torch.tensor([0, 1, 1, 1]), torch.ones(2)).tolist() == [0, 0, 0, 0]


def test_gdpo_refuses_shapes_that_do_not_agree():
    with pytest.raises(ValueError, match=r"\(2, 3\) with groups of \(2,\) and weights of \(2,\)"):
        gdpo_advantages(torch.zeros(2, 3), torch.zeros(2), torch.ones(2))
