"""Means, variances and whitening see the True tokens and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.masking import aggregate_mean, denominator, masked_mean, masked_variance, masked_whiten, select
from rlhf_ray.errors import ConfigError

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, False, False]])
X = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, 1e30]])


def test_mean_is_over_true_tokens():
    assert masked_mean(X, MASK).item() == 3.0  # (1 + 3 + 5) / 3


def test_mean_of_bfloat16_is_summed_in_float32():
    x = torch.ones(1, 1000, dtype=torch.bfloat16)  # bfloat16 cannot count past 256 in steps of 1
    x[0, 0] = 1001.0  # rounds to 1000 in bfloat16
    assert masked_mean(x, torch.ones(1, 1000, dtype=torch.bool)).item() == pytest.approx((1000 + 999) / 1000)


def test_variance_is_unbiased():
    assert masked_variance(X, MASK).item() == 4.0  # ((-2)² + 0² + 2²) / (3 - 1); the biased one is 8/3


def test_whiten_by_hand():
    expected = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])  # (x - 3) / sqrt(4)
    torch.testing.assert_close(masked_whiten(X, MASK), expected)


def test_whiten_of_constants_and_of_one_token_is_zero():
    assert masked_whiten(torch.full((2, 3), 0.5), MASK).abs().max() == 0
    one = torch.tensor([[False, True, False]])
    assert masked_whiten(torch.tensor([[NAN, 7.0, NAN]]), one).tolist() == [[0.0, 0.0, 0.0]]


def test_sequence_aggregate_is_the_mean_of_row_means_over_rows_with_tokens():
    x = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert aggregate_mean(x, mask, "sequence").item() == 3.5  # ((1 + 3) / 2 + 5 / 1) / 2 rows
    assert aggregate_mean(x, mask, "token").item() == 3.0  # (1 + 3 + 5) / 3 tokens
    assert (denominator(mask, "sequence").item(), denominator(mask, "token").item()) == (2, 3)


def test_row_weights_that_add_up_to_one_a_sample_give_the_mean_of_the_samples_means():
    x = torch.tensor([[1.0, 3.0], [5.0, NAN], [7.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    weights = torch.tensor([0.25, 0.75, 1.0])  # the first two rows are one sample
    assert aggregate_mean(x, mask, "sequence", weights).item() == 6.125  # (0.25 * 2 + 0.75 * 5 + 8) / 2 samples
    assert aggregate_mean(x, mask, "token", weights).item() == 5.0  # (1 + 3 + 5 + 7 + 9) / 5 tokens
    assert (denominator(mask, "sequence", weights).item(), denominator(mask, "token", weights).item()) == (2, 5)
    # Summed over micro-batches, the rows of a sample in different ones, the shares are the whole.
    shares = [aggregate_mean(x[i:j], mask[i:j], "sequence", weights[i:j])
              * denominator(mask[i:j], "sequence", weights[i:j]) / 2 for i, j in ((0, 1), (1, 3))]
    assert sum(shares).item() == 6.125


def test_one_row_a_sample_aggregates_to_the_same_bytes_as_the_mean_of_row_means():
    x, mask = torch.randn(9, 7, generator=torch.manual_seed(0)), torch.rand(9, 7) < 0.6
    mask[3] = False

    def mean_of_row_means(y):
        rows = torch.where(mask, y, torch.zeros_like(y)).sum(-1) / mask.sum(-1).clamp(min=1)
        return rows.sum() / mask.any(-1).sum().clamp(min=1)

    found = []
    for mean in (mean_of_row_means, lambda y: aggregate_mean(y, mask, "sequence", torch.ones(9))):
        y = x.clone().requires_grad_()
        loss = mean(y)
        loss.backward()
        found.append((loss.detach().numpy().tobytes(), y.grad.numpy().tobytes()))
    assert found[0] == found[1]
    assert float(denominator(mask, "sequence", torch.ones(9))) == float(mask.any(-1).sum())


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_empty_masks_give_zero_with_a_zero_gradient(aggregate):
    x = torch.full((2, 3), NAN, requires_grad=True)
    mean = aggregate_mean(x, torch.zeros(2, 3, dtype=torch.bool), aggregate)
    mean.backward()
    assert mean.item() == 0
    assert x.grad.tolist() == [[0.0] * 3] * 2
    assert masked_whiten(x, torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2


def test_gradient_outside_the_mask_is_zero_whatever_stands_there():
    x = X.clone().requires_grad_()
    masked_whiten(x, MASK).square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~MASK] == 0).all()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3,\)"):
        select(X, torch.tensor([True, True, False]))


def test_unknown_aggregate_is_named():
    with pytest.raises(ConfigError, match="'batch'"):
        aggregate_mean(X, MASK, "batch")


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), length=st.integers(1, 6), pad=st.integers(0, 3))
def test_whitening_ignores_padding_and_row_order(seed, rows, length, pad):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < 0.7
    order = torch.randperm(rows, generator=g)
    padded = torch.cat([x, torch.full((rows, pad), NAN, dtype=torch.float64)], 1)[order]
    padded_mask = torch.cat([mask, torch.zeros(rows, pad, dtype=torch.bool)], 1)[order]
    result = masked_whiten(padded, padded_mask)
    torch.testing.assert_close(result[:, :length], masked_whiten(x, mask)[order], rtol=1e-9, atol=1e-9)
    assert (result[:, length:] == 0).all()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(2, 6), aggregate=st.sampled_from(["token", "sequence"]))
def test_shares_of_micro_batches_sum_to_the_whole(seed, rows, aggregate):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, 4, generator=g) < 0.5
    cut = int(torch.randint(1, rows, (), generator=g))
    total = denominator(mask, aggregate).clamp(min=1)
    parts = [(x[:cut], mask[:cut]), (x[cut:], mask[cut:])]
    summed = sum(aggregate_mean(a, m, aggregate) * denominator(m, aggregate) / total for a, m in parts)
    torch.testing.assert_close(summed, aggregate_mean(x, mask, aggregate))
