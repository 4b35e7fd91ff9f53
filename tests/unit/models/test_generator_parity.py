"""Gaps of log-probabilities, how large they may be, and the rows on which they are measured."""

import numpy as np
import pytest
from transformers import LlamaConfig

from rlhf_ray.models.generator_parity import (
    TOLERATED,
    given_rows,
    logprob_gap,
    tolerated_gap,
    tolerated_later,
    typical_gap,
)


def test_gaps_are_the_root_mean_square_and_the_median():
    one, other = np.array([-1, -2, -3, -4, -5], np.float32), np.array([-1, -2, -3, -4, -8], np.float32)
    assert logprob_gap(one, other) == pytest.approx((9 / 5) ** 0.5) and typical_gap(one, other) == 0.0
    assert typical_gap(one, one - np.array([3, 1, 2, 5, 4], np.float32)) == 3.0


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_of_one_side_only_that_is_not_finite_is_an_infinite_gap(number):
    one, other = np.array([-1.0], np.float32), np.array([number], np.float32)
    assert logprob_gap(one, other) == typical_gap(one, other) == np.inf
    assert np.isinf(number) <= (logprob_gap(other, other) == 0.0)


def test_what_is_tolerated_grows_with_rounding():
    assert tolerated_gap("float32", 0.0) == TOLERATED["float32"] == 1e-4
    assert tolerated_gap("bfloat16", 0.1) == pytest.approx(0.05 + 0.25)
    assert tolerated_later("float32", 2e-6, 1e-6, 2e-6) == pytest.approx(1e-5 + 2.5 * (1e-6 + 2e-6))
    assert tolerated_later("float32", 6e-6, 1e-6, 2e-6) == pytest.approx(1e-5 + 2.5 * (3e-6 + 6e-6))
    assert tolerated_later("float32", 1e-6, 1e-6, 2e-6) == pytest.approx(1e-5 + 2.5 * (1e-6 + 1e-6)), "not less"
    assert tolerated_later("bfloat16", 0.0, 0.0, 0.0) == pytest.approx(5e-3)


@pytest.mark.parametrize(("longest", "lengths"), [(1000, [31, 21, 13, 8]), (12, [12, 12, 12, 8]), (2, [2, 2, 2, 2])])
def test_rows_are_the_same_each_time_fit_and_lack_the_padding(longest, lengths):
    config = LlamaConfig(vocab_size=5, pad_token_id=3)
    rows, again = given_rows(config, longest), given_rows(config, longest)
    assert rows.lengths.tolist() == lengths and np.array_equal(rows.tokens, again.tokens)
    assert set(rows.tokens.tolist()) <= {0, 1, 2, 4} and rows.tokens.dtype == np.int32
    assert not rows.response_mask[rows.offsets[:-1]].any() and rows.response_mask.sum() == sum(lengths) - 4
