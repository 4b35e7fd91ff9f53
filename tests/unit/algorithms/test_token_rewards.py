"""One score a response becomes one reward a token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.algorithms.advantage_estimators import last_true, token_rewards
from rlhf_ray.errors import ConfigError

NAN = float("nan")
MASK = torch.tensor(
    [
        [False, True, True, False],  # prompt, two response tokens, padding
        [True, True, False, True],  # a gap before the last token
        [False, False, False, False],  # no response at all
    ]
)
KL = torch.tensor([[NAN, 1.0, 2.0, NAN], [1.0, -1.0, NAN, 4.0], [NAN, NAN, NAN, NAN]])
SCORES = torch.tensor([10.0, -20.0, NAN])


def test_rewards_by_hand():
    rewards = token_rewards(SCORES, KL, MASK, kl_coef=0.5)
    expected = [
        [0.0, -0.5, 9.0, 0.0],  # -0.5 * 1; -0.5 * 2 + 10
        [-0.5, 0.5, 0.0, -22.0],  # -0.5 * 1; +0.5; gap; -0.5 * 4 - 20
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert rewards.tolist() == expected


def test_clip_bounds_scores_and_not_the_kl():
    rewards = token_rewards(SCORES, KL * 100, MASK, kl_coef=1.0, clip=5.0)
    assert rewards[0].tolist() == [0.0, -100.0, -195.0, 0.0]  # -200 + 5
    assert rewards[1].tolist() == [-100.0, 100.0, 0.0, -405.0]  # -400 - 5


def test_last_true_marks_one_token_a_row():
    assert last_true(MASK).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_failed_scores_stay_visible():
    rewards = token_rewards(torch.tensor([NAN, 1.0, 1.0]), KL, MASK, 0.1, clip=5.0)
    assert rewards[0].isnan().tolist() == [False, False, True, False]


def test_half_precision_is_computed_in_float32():
    rewards = token_rewards(SCORES.bfloat16(), KL.bfloat16(), MASK, 0.1)
    assert rewards.dtype == torch.float32
    assert rewards[0, 1].item() == pytest.approx(-0.1, rel=1e-6)  # 0.1 in bfloat16 is 0.10009765625


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="clip 0"):
        token_rewards(SCORES, KL, MASK, 0.1, clip=0.0)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        token_rewards(SCORES[:2], KL, MASK, 0.1)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), length=st.integers(1, 6))
def test_rows_sum_to_score_minus_penalty(seed, rows, length):
    g = torch.Generator().manual_seed(seed)
    scores, kl = torch.randn(rows, generator=g).double(), torch.randn(rows, length, generator=g).double()
    mask = torch.rand(rows, length, generator=g) < 0.6
    expected = mask.any(1) * scores - 0.3 * (kl * mask).sum(1)
    torch.testing.assert_close(token_rewards(scores, kl.masked_fill(~mask, NAN), mask, 0.3).sum(1), expected)
