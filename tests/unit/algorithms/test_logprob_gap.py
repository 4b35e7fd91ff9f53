"""The histogram of the gap between generators and learner, against quantiles of all gaps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.logprob_gap import BINS, gap_histogram, gap_quantile

WIDTH = 10 ** (9 / BINS)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**16), scale=st.floats(1e-5, 1), parts=st.integers(1, 4))
def test_quantiles_of_added_histograms_are_those_of_all_tokens_up_to_a_bins_width(seed, scale, parts):
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = torch.randn(2, parts, 7, 11, generator=generator) * scale
    mask = torch.rand(parts, 7, 11, generator=generator) < 0.7
    total = sum(gap_histogram(*part) for part in zip(ours, theirs, mask, strict=True))
    assert total.sum() == mask.sum()
    gaps = (ours - theirs).abs()[mask].numpy()
    for share in (0.5, 0.99, 1.0):
        exact = np.quantile(gaps, share, method="inverted_cdf")
        assert exact <= gap_quantile(total, share) * (1 + 1e-5) and gap_quantile(total, share) <= exact * WIDTH * 1.001


@pytest.mark.parametrize(("gap", "found"), [(0.0, 1e-7 * WIDTH), (1e-9, 1e-7 * WIDTH), (1e6, 100.0), (np.inf, 100.0)])
def test_gaps_beyond_the_bins_count_in_the_outer_ones(gap, found):
    histogram = gap_histogram(torch.tensor([gap]), torch.zeros(1), torch.ones(1, dtype=torch.bool))
    assert histogram.sum() == 1
    assert gap_quantile(histogram, 0.5) == pytest.approx(found)


def test_without_tokens_the_gap_is_zero():
    histogram = gap_histogram(torch.ones(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert gap_quantile(histogram, 0.99) == 0
