"""The critic's loss by hand on four tokens, its gradient, and what must not change it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.losses import value_loss, value_stats
from rlhf_ray.errors import ConfigError

NAN = float("nan")
MASK = torch.tensor([[True, True, True, True, False]])
VALUES = torch.tensor([[1.0, 3.0, 0.0, 2.0, NAN]])
OLD = torch.tensor([[1.5, 1.0, 2.0, 2.0, NAN]])
RETURNS = torch.tensor([[2.0, 4.0, 0.5, 2.0, NAN]])
# squares: 1, 1, 0.25, 0. Clipped at ±1 around OLD: 1, 2, 1, 2 -> squares 1, 4, 0.25, 0


def batch(seed, rows=3, length=4):
    g = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, rows, length, generator=g, dtype=torch.float64)
    return values, old, returns, torch.rand(rows, length, generator=g) < 0.7


def test_plain_loss_by_hand():
    loss, stats = value_loss(VALUES, OLD, RETURNS, MASK), value_stats(VALUES, OLD, RETURNS, MASK)
    assert loss.item() == pytest.approx((1 + 1 + 0.25 + 0) / 4 / 2)
    assert stats["clip_fraction"].item() == 0


def test_clipped_loss_takes_the_worse_of_both():
    loss, stats = value_loss(VALUES, OLD, RETURNS, MASK, clip=1.0), value_stats(VALUES, OLD, RETURNS, MASK, clip=1.0)
    assert loss.item() == pytest.approx((1 + 4 + 0.25 + 0) / 4 / 2)
    assert stats["clip_fraction"].item() == 0.25  # the third token's clip (0 -> 1) leaves its square as it was


def test_rows_may_count_alike_whatever_their_length():
    two = [torch.tensor([column[0, :2].tolist(), [float(column[0, 2]), 7.0]]) for column in (VALUES, OLD, RETURNS)]
    mask = torch.tensor([[True, True], [True, False]])
    assert value_loss(*two, mask).item() == pytest.approx((1 + 1 + 0.25) / 3 / 2)
    assert value_loss(*two, mask, aggregate="sequence").item() == pytest.approx((1 + 0.25) / 2 / 2)
    weighed = value_loss(*two, mask, aggregate="sequence", row_weights=torch.tensor([0.25, 0.75]))
    assert weighed.item() == pytest.approx((0.25 * 1 + 0.75 * 0.25) / 2)


def test_stats_by_hand():
    stats = value_stats(VALUES.clone().requires_grad_(), OLD, RETURNS, MASK, clip=1.0)
    assert stats["value_mean"].item() == 1.5  # (1 + 3 + 0 + 2) / 4
    assert stats["error"].item() == pytest.approx(2.25 / 4)  # unclipped, without the half
    assert set(stats) == {"clip_fraction", "value_mean", "error"}
    assert not any(value.requires_grad for value in stats.values())


def test_rounding_is_not_counted_as_clipping():
    values, old = torch.linspace(-0.1, 0.1, 1000)[None], torch.full((1, 1000), 1e4)
    # old + (values - old) would be values rounded to thousandths
    stats = value_stats(values, old, values + 1, torch.ones(1, 1000, dtype=torch.bool), clip=1e5)
    assert stats["clip_fraction"].item() == 0


def test_gradient_by_hand():
    values = VALUES.clone().requires_grad_()
    value_loss(values, OLD, RETURNS, MASK, clip=1.0).backward()
    # 1/2 d(V - R)² = V - R, over 4: -1; the clipped token 0; token 3 is a tie, and half of -0.5; 0; outside 0
    torch.testing.assert_close(values.grad, torch.tensor([[-1.0, 0.0, -0.25, 0.0, 0.0]]) / 4)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_check(seed, clip):
    values, old, returns, mask = batch(seed)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, mask, clip), values.requires_grad_())


def test_gradients_flow_through_the_values_alone():
    values, old, returns, mask = (t.requires_grad_() if t.is_floating_point() else t for t in batch(0))
    value_loss(values, old, returns, mask, clip=0.5).backward()
    assert values.grad.abs().sum() > 0
    assert old.grad is None
    assert returns.grad is None


@pytest.mark.parametrize("shape", [(2, 3), (2, 0)])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_empty_masks_give_zero_and_zero_gradients(shape, clip):
    values = torch.full(shape, NAN, requires_grad=True)
    columns = (values, values, values, torch.zeros(shape, dtype=torch.bool))
    loss, stats = value_loss(*columns, clip), value_stats(*columns, clip)
    loss.backward()
    assert loss.item() == 0
    assert (values.grad == 0).all()
    assert all(value.item() == 0 for value in stats.values())


def test_clip_must_be_positive():
    with pytest.raises(ConfigError, match="value clip 0"):
        value_loss(VALUES, OLD, RETURNS, MASK, clip=0.0)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(2, 5), clip=st.sampled_from([None, 0.3]))
def test_padding_order_and_cut_of_the_batch_change_nothing(seed, rows, clip):
    *columns, mask = batch(seed, rows)

    def loss_of(chosen, pad=0):
        def prepared(x, fill):
            return torch.nn.functional.pad(x[chosen].masked_fill(~mask[chosen], fill), (pad, pad), value=fill)

        loss = value_loss(*(prepared(x, NAN) for x in columns), prepared(mask, False), clip)
        return loss * mask[chosen].sum()

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    whole = loss_of(torch.arange(rows))
    torch.testing.assert_close(loss_of(order, pad=2), whole)
    torch.testing.assert_close(sum(loss_of(part) for part in order.split(2)), whole)
