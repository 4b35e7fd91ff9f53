"""PPO's surrogate by hand on a few tokens, its gradient, and what must not change it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.losses import entropy_bonus, policy_loss
from rlhf_ray.algorithms.masking import denominator
from rlhf_ray.errors import ConfigError

NAN = float("nan")
MASK = torch.tensor([[True, True, True, True, False]])
OLD = torch.tensor([[-1.0, -1.0, -1.0, -1.0, NAN]])
RATIO = torch.tensor([[1.5, 0.5, 2.0, 1.1, NAN]])
NEW = OLD + RATIO.log()
ADVANTAGES = torch.tensor([[2.0, 2.0, -1.0, -1.0, NAN]])
# per token, clipped at ±0.2:  max(-3, -2.4) = -2.4;  max(-1, -1.6) = -1;  max(2, 1.2) = 2;  max(1.1, 1.1) = 1.1


def batch(seed, rows=3, length=4):
    """Float64 logprobs, old logprobs, advantages, mask and behaviour logprobs; ratios in and out of the clip range."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=g, dtype=torch.float64) - 0.1
    new, behaviour = (old + 0.5 * torch.randn(2, rows, length, generator=g, dtype=torch.float64)).unbind()
    advantages, mask = torch.randn(rows, length, generator=g).double(), torch.rand(rows, length, generator=g) < 0.7
    return new, old, advantages, mask, behaviour


def test_loss_and_stats_by_hand():
    loss, stats = policy_loss(NEW.clone().requires_grad_(), OLD, ADVANTAGES, MASK, 0.2, 0.2)
    assert loss.item() == pytest.approx((-2.4 - 1.0 + 2.0 + 1.1) / 4)
    assert stats["clip_fraction"].item() == 0.25  # only the first token's loss was changed
    assert stats["ratio_mean"].item() == pytest.approx((1.5 + 0.5 + 2.0 + 1.1) / 4)
    k3 = [r - 1 - math.log(r) for r in (1.5, 0.5, 2.0, 1.1)]
    assert stats["approx_kl"].item() == pytest.approx(sum(k3) / 4, rel=1e-5)
    logs = [math.log(r) for r in (1.5, 0.5, 2.0, 1.1)]
    assert stats["approx_kl_k1"].item() == pytest.approx(-sum(logs) / 4, rel=1e-5)
    assert stats["approx_kl_k2"].item() == pytest.approx(sum(d**2 for d in logs) / 8, rel=1e-5)
    assert set(stats) == {"clip_fraction", "ratio_mean", "approx_kl", "approx_kl_k1", "approx_kl_k2"}
    assert not any(value.requires_grad for value in stats.values())


def test_lower_and_upper_clip_are_separate_epsilons():
    one = torch.tensor([[True]])
    cases = [(1.5, 1.0, 0.1, 0.3, -1.3), (0.5, -1.0, 0.1, 0.3, 0.9)]  # -1 * (1 + 0.3); 1 * (1 - 0.1)
    for ratio, advantage, low, high, expected in cases:
        new, old = torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1)
        assert policy_loss(new, old, torch.tensor([[advantage]]), one, low, high)[0].item() == pytest.approx(expected)


def test_dual_clip_bounds_the_loss_at_negative_advantages_only():
    new = torch.log(torch.tensor([[10.0, 10.0, 2.0]]))
    advantages = torch.tensor([[-1.0, 1.0, -1.0]])
    loss, stats = policy_loss(new, torch.zeros(1, 3), advantages, torch.ones(1, 3, dtype=torch.bool), 0.2, 0.2, 3.0)
    assert loss.item() == pytest.approx((3.0 - 1.2 + 2.0) / 3)  # min(10, 3 * 1); max(-10, -1.2); 2 is within the bound
    assert stats["clip_fraction"].item() == pytest.approx(2 / 3)


def test_truncated_importance_weights_multiply_the_loss():
    behaviour = OLD - torch.log(torch.tensor([[4.0, 0.5, 1.0, 1.0, NAN]]))  # old / behaviour = 4, 0.5, 1, 1
    loss, stats = policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2, behaviour_logprobs=behaviour, is_cap=2.0)
    assert loss.item() == pytest.approx((2.0 * -2.4 + 0.5 * -1.0 + 2.0 + 1.1) / 4)
    assert stats["is_weight_mean"].item() == pytest.approx((2.0 + 0.5 + 1.0 + 1.0) / 4)
    uncapped, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2, behaviour_logprobs=behaviour)
    assert uncapped.item() == pytest.approx((4.0 * -2.4 + 0.5 * -1.0 + 2.0 + 1.1) / 4)


def test_masked_importance_weights_leave_tokens_out():
    behaviour = OLD - torch.log(torch.tensor([[4.0, 0.5, 2.0, 1.0, NAN]]))
    options = {"behaviour_logprobs": behaviour, "is_cap": 2.0, "importance": "mask"}
    loss, stats = policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2, **options)
    assert loss.item() == pytest.approx((0 + 0.5 * -1.0 + 2.0 * 2.0 + 1.1) / 4), "the mean stays over four tokens"
    assert stats["is_weight_mean"].item() == pytest.approx((0 + 0.5 + 2.0 + 1.0) / 4)
    assert stats["is_capped_fraction"].item() == 0.25


@pytest.mark.parametrize(("kind", "weights"), [("truncate", (1.5, 0.5)), ("mask", (0.0, 0.5))])
def test_a_response_s_importance_weight_is_the_product_of_its_tokens(kind, weights):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    old = torch.zeros(2, 3).masked_fill(~mask, NAN)
    behaviour = -torch.log(torch.tensor([[4.0, 0.5, NAN], [2.0, 0.5, 0.5]]))  # products 2 and 1/2
    advantages = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, 5.0]])
    options = {"behaviour_logprobs": behaviour, "is_cap": 1.5, "importance": kind, "importance_level": "sequence"}
    loss, stats = policy_loss(old, old, advantages, mask, 0.2, 0.2, **options)
    assert loss.item() == pytest.approx(-(weights[0] * 3.0 + weights[1] * 12.0) / 5)
    assert stats["is_weight_mean"].item() == pytest.approx((2 * weights[0] + 3 * weights[1]) / 5)
    assert stats["is_capped_fraction"].item() == pytest.approx(2 / 5)


def sequence_ratio_batch():
    """Log-ratios 0.2 and 0.4 (mean 0.3) in one row, -0.1 in the other; logprobs ask for gradients."""
    mask = torch.tensor([[True, True], [True, False]])
    new = torch.tensor([[-1.0, -1.0], [-1.0, NAN]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.2, -1.4], [-0.9, NAN]], dtype=torch.float64)
    return new, old, mask


def test_a_response_s_ratio_is_the_geometric_mean_of_its_tokens():
    new, old, mask = sequence_ratio_batch()
    advantages = torch.tensor([[-1.0, -1.0], [2.0, NAN]], dtype=torch.float64)
    loss, stats = policy_loss(new, old, advantages, mask, 0.2, 0.2, aggregate="sequence", ratio="sequence")
    first, second = math.exp(0.3), math.exp(-0.1)
    assert loss.item() == pytest.approx((first - 2 * second) / 2)
    assert stats["ratio_mean"].item() == pytest.approx((2 * first + second) / 3)
    loss.backward()
    # d s / d logprob = s / length; rows weigh 1/2
    expected = [[first / 4, first / 4], [-second, 0]]
    torch.testing.assert_close(new.grad, torch.tensor(expected, dtype=torch.float64))


def test_a_clipped_response_has_no_gradient_on_any_token():
    new, old, mask = sequence_ratio_batch()
    advantages = torch.tensor([[1.0, 1.0], [2.0, NAN]], dtype=torch.float64)
    loss, stats = policy_loss(new, old, advantages, mask, 0.2, 0.2, ratio="sequence")
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 + 1.2 + 2 * math.exp(-0.1)) / 3)
    assert new.grad[0].tolist() == [0, 0] and new.grad[1, 0] < 0
    assert stats["clip_fraction"].item() == pytest.approx(2 / 3)


def test_advantages_of_tokens_keep_their_own_under_a_shared_ratio():
    new, old, mask = sequence_ratio_batch()
    advantages = torch.tensor([[-1.0, -3.0], [0.0, NAN]], dtype=torch.float64)
    policy_loss(new, old, advantages, mask, 0.2, 0.2, ratio="sequence")[0].backward()
    torch.testing.assert_close(new.grad[0], math.exp(0.3) * torch.tensor([1.0, 3.0], dtype=torch.float64) / 3)


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_check_of_the_sequence_ratio(seed, aggregate):
    new, old, advantages, mask, behaviour = batch(seed)
    options = {"behaviour_logprobs": behaviour, "is_cap": 1.2, "importance_level": "sequence", "aggregate": aggregate}
    rows = advantages[:, :1].expand_as(new)  # one advantage a row, as group estimators give
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, rows, mask, 0.2, 0.3, 1.5, ratio="sequence", **options)[0], new.requires_grad_()
    )


def test_sequence_aggregate_weighs_rows_equally():
    new = torch.zeros(2, 3)
    advantages = torch.tensor([[1.0, 2.0, 3.0], [8.0, NAN, NAN]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    token, sequence = (
        policy_loss(new, new, advantages, mask, 0.2, 0.2, aggregate=a)[0].item() for a in ("token", "sequence")
    )
    assert token == -3.5  # -(1 + 2 + 3 + 8) / 4
    assert sequence == -5.0  # -((1 + 2 + 3) / 3 + 8) / 2


def test_gradient_by_hand():
    new = NEW.clone().requires_grad_()
    policy_loss(new, OLD, ADVANTAGES, MASK, 0.2, 0.2)[0].backward()
    # d(-A r)/d logprob = -A r, over 4 tokens; 0 where the clip holds: 0, -2 * 0.5, 2.0, 1.1; 0 outside the mask
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, -1.0, 2.0, 1.1, 0.0]]) / 4)


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_check(seed, aggregate):
    new, old, advantages, mask, behaviour = batch(seed)
    options = {"dual_clip": 1.5, "behaviour_logprobs": behaviour, "is_cap": 1.2, "aggregate": aggregate}
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, advantages, mask, 0.2, 0.3, **options)[0], new.requires_grad_()
    )


def test_gradients_flow_through_the_new_logprobs_alone():
    new, old, advantages, mask, behaviour = (t.requires_grad_() if t.is_floating_point() else t for t in batch(0))
    policy_loss(new, old, advantages, mask, 0.2, 0.2, behaviour_logprobs=behaviour)[0].backward()
    assert new.grad.abs().sum() > 0
    assert old.grad is None
    assert advantages.grad is None
    assert behaviour.grad is None


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_absurd_ratios_stay_finite(advantage):
    new = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0]])
    advantages, mask = torch.full((1, 2), advantage), torch.ones(1, 2, dtype=torch.bool)
    loss, stats = policy_loss(new, old, advantages, mask, 0.2, 0.2, behaviour_logprobs=old - 200, is_cap=2.0)
    loss.backward()
    assert loss.isfinite()
    assert new.grad.isfinite().all()
    assert stats["ratio_mean"].isfinite()
    assert stats["is_weight_mean"].item() == pytest.approx(2.0)
    assert stats["approx_kl"].item() == float("inf")  # e^200: estimators are never clamped, the report stays honest


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_empty_masks_give_zero_and_zero_gradients(shape, aggregate):
    new = torch.full(shape, NAN, requires_grad=True)
    loss, stats = policy_loss(new, new, new, torch.zeros(shape, dtype=torch.bool), 0.2, 0.2, aggregate=aggregate)
    loss.backward()
    assert loss.item() == 0
    assert (new.grad == 0).all()
    assert all(value.item() == 0 for value in stats.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"is_cap": 2.0}, "need behaviour_logprobs"),
        ({"is_cap": 0.0, "behaviour_logprobs": OLD}, "is_cap=0.0"),
        ({"aggregate": "row"}, "'row'"),
        ({"ratio": "row"}, "ratio='row'"),
        ({"importance": "drop"}, "importance='drop'"),
        ({"importance_level": "row", "behaviour_logprobs": OLD}, "level 'row'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2, **options)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(2, 5), aggregate=st.sampled_from(["token", "sequence"]),
       ratio=st.sampled_from(["token", "sequence"]), importance=st.sampled_from(["truncate", "mask"]),
       level=st.sampled_from(["token", "sequence"]))
def test_padding_order_and_cut_of_the_batch_change_nothing(seed, rows, aggregate, ratio, importance, level):
    new, old, advantages, mask, behaviour = batch(seed, rows)

    def loss_of(rows_chosen, pad=0):
        def prepared(x, fill):
            return torch.nn.functional.pad(x[rows_chosen].masked_fill(~mask[rows_chosen], fill), (pad, pad), value=fill)

        columns = [prepared(x, NAN) for x in (new, old, advantages)]
        loss, _ = policy_loss(
            *columns, prepared(mask, False), 0.2, 0.2, 3.0, prepared(behaviour, NAN), 2.0, aggregate=aggregate,
            ratio=ratio, importance=importance, importance_level=level,
        )
        return loss * denominator(mask[rows_chosen], aggregate)

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    whole = loss_of(torch.arange(rows))
    torch.testing.assert_close(loss_of(order, pad=2), whole)
    torch.testing.assert_close(sum(loss_of(part) for part in order.split(2)), whole)


def test_entropy_bonus_is_the_mean_over_true_tokens():
    entropy = torch.tensor([[1.0, 2.0, NAN]], requires_grad=True)
    bonus = entropy_bonus(entropy, torch.tensor([[True, True, False]]))
    bonus.backward()
    assert bonus.item() == 1.5
    assert entropy.grad.tolist() == [[0.5, 0.5, 0.0]]
