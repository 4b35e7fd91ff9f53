"""CISPO by hand on a few tokens, and its gradient."""

import math

import pytest
import torch

from rlhf_ray.algorithms.losses import cispo_loss, policy_loss
from rlhf_ray.algorithms.masking import denominator
from rlhf_ray.errors import ConfigError

NAN = float("nan")
MASK = torch.tensor([[True, True, True, True, False]])
OLD = torch.tensor([[-3.0, -1.0, -3.0, -1.0, NAN]])
RATIO = torch.tensor([[6.0, 0.5, 8.0, 1.1, NAN]])
NEW = OLD + RATIO.log()
ADVANTAGES = torch.tensor([[2.0, 2.0, -1.0, -1.0, NAN]])
# minus clipped ratio times advantage, of each token, with a maximum of 5
WEIGHTS = [-5.0 * 2.0, -0.5 * 2.0, 5.0 * 1.0, 1.1 * 1.0]


def test_loss_and_stats_by_hand():
    loss, stats = cispo_loss(NEW.clone().requires_grad_(), OLD, ADVANTAGES, MASK)
    logprobs = [math.log(6) - 3, math.log(0.5) - 1, math.log(8) - 3, math.log(1.1) - 1]
    assert loss.item() == pytest.approx(sum(w * p for w, p in zip(WEIGHTS, logprobs, strict=True)) / 4, rel=1e-5)
    assert stats["clip_fraction"].item() == 0.5  # whatever the sign of the advantage
    assert stats["ratio_mean"].item() == pytest.approx((6.0 + 0.5 + 8.0 + 1.1) / 4, rel=1e-5)
    plain = policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2)[1]
    assert stats.keys() == plain.keys()
    assert all(stats[name] == plain[name] for name in stats if name != "clip_fraction")
    assert not any(value.requires_grad for value in stats.values())


def test_a_clipped_token_keeps_its_gradient_at_the_size_of_the_bound():
    new = NEW.clone().requires_grad_()
    cispo_loss(new, OLD, ADVANTAGES, MASK)[0].backward()
    torch.testing.assert_close(new.grad, torch.tensor([[*WEIGHTS, 0.0]]) / 4)
    assert policy_loss(new, OLD, ADVANTAGES, MASK, 0.2, 4.0)[0].requires_grad
    ppo = torch.autograd.grad(policy_loss(new, OLD, ADVANTAGES, MASK, 0.2, 4.0)[0], new)[0]
    assert ppo[0, 0] == 0, "PPO's clip at the same ratio removes it"


def test_the_smallest_ratio_is_a_ratio_and_no_distance_from_one():
    new = NEW.clone().requires_grad_()
    loss, stats = cispo_loss(new, OLD, ADVANTAGES, MASK, max_ratio=7.0, min_ratio=0.9)
    loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-6.0 * 2, -0.9 * 2, 7.0, 1.1, 0.0]]) / 4)
    assert stats["clip_fraction"].item() == 0.5


def test_rows_weigh_equally_or_by_their_weights():
    new = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([[1.0, 1.0], [1.0, NAN]])
    losses = {aggregate: cispo_loss(new, new, advantages, mask, aggregate=aggregate)[0].item()
              for aggregate in ("token", "sequence")}
    assert losses == {"token": 2.0, "sequence": 2.25}  # (1 + 2 + 3) / 3; ((1 + 2) / 2 + 3) / 2
    weighted = cispo_loss(new, new, advantages, mask, aggregate="sequence", row_weights=torch.tensor([0.25, 0.75]))[0]
    assert weighted.item() == pytest.approx(0.25 * 1.5 + 0.75 * 3)


def test_parts_of_a_batch_add_up_to_the_whole():
    g = torch.Generator().manual_seed(0)
    old, gap, advantages = torch.randn(3, 4, 5, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=g) < 0.7
    for aggregate in ("token", "sequence"):
        def share(rows, aggregate=aggregate):
            loss = cispo_loss((old + gap)[rows], old[rows], advantages[rows], mask[rows], 1.5, 0.5, aggregate)[0]
            return loss * denominator(mask[rows], aggregate)
        torch.testing.assert_close(share([0, 3]) + share([2, 1]), share([0, 1, 2, 3]))


def test_absurd_ratios_stay_finite_and_empty_masks_give_zero():
    new = torch.tensor([[-0.5]], requires_grad=True)
    loss, stats = cispo_loss(new, new.detach() - 200, torch.tensor([[0.0]]), torch.tensor([[True]]))
    loss.backward()
    assert loss.item() == 0 and new.grad.item() == 0 and stats["ratio_mean"].isfinite()
    empty = torch.full((2, 3), NAN, requires_grad=True)
    cispo_loss(empty, empty, empty, torch.zeros(2, 3, dtype=torch.bool))[0].backward()
    assert (empty.grad == 0).all()


@pytest.mark.parametrize("bounds", [(0.5, 0.5), (1.0, 2.0), (5.0, -0.1)])
def test_bounds_out_of_order_are_refused(bounds):
    with pytest.raises(ConfigError, match=f"min_ratio={bounds[1]}"):
        cispo_loss(NEW, OLD, ADVANTAGES, MASK, *bounds)
