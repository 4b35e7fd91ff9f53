"""Running moments, length penalties and length-adaptive lambda by hand."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.algorithms.score_shaping import RunningMoments, length_adaptive_lambda, overlong_penalty
from rlhf_ray.errors import ConfigError

FLOATS = st.floats(-1e3, 1e3, width=32)


def moments_of(*parts):
    moments = RunningMoments()
    for part in parts:
        moments.update(torch.tensor(part))
    return moments


def test_moments_by_hand():
    moments = moments_of([1.0, 2.0], [6.0])
    assert (moments.count, moments.mean, moments.deviation) == (3, 3.0, pytest.approx(7**0.5))


@given(st.lists(st.lists(FLOATS, max_size=5), max_size=6))
def test_moments_do_not_depend_on_how_scores_came(parts):
    whole = [x for part in parts for x in part]
    moments, at_once = moments_of(*parts), moments_of(whole)
    assert moments.count == at_once.count == len(whole)
    assert moments.mean == pytest.approx(at_once.mean, abs=1e-9)
    if len(whole) > 1 and at_once.deviation != 1.0:
        exact = torch.tensor(whole, dtype=torch.float64).std().item()
        assert moments.deviation == pytest.approx(exact, rel=1e-6) == pytest.approx(at_once.deviation)


@pytest.mark.parametrize("scores", [[], [5.0], [2.0, 2.0, 2.0]])
def test_without_a_spread_nothing_is_scaled(scores):
    assert moments_of(scores).deviation == 1.0


def test_scores_that_are_not_finite_say_nothing():
    assert moments_of([1.0, math.nan, 3.0, math.inf]).state_dict() == moments_of([1.0, 3.0]).state_dict()
    assert moments_of([math.nan]).count == 0


def test_moments_go_on_from_json():
    moments, again = moments_of([1.0, 2.0]), RunningMoments()
    again.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    for each in (moments, again):
        each.update(torch.tensor([7.0, -1.0]))
    assert again.state_dict() == moments.state_dict()


def test_the_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, limit=10, buffer=4).tolist() == [0, 0, -0.25, -0.5, -1, -1]


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_beyond_the_limit_is_refused(buffer):
    with pytest.raises(ConfigError, match=f"buffer of {buffer} tokens"):
        overlong_penalty(torch.tensor([1]), 10, buffer)


def test_lambda_follows_the_length():
    found = length_adaptive_lambda(torch.tensor([0, 10, 20, 40, 1000]), 0.05)
    assert found.tolist() == pytest.approx([0, 0, 0, 0.5, 0.98])
    with pytest.raises(ConfigError, match="alpha=0"):
        length_adaptive_lambda(torch.tensor([1]), 0)


def test_two_scores_have_a_deviation():
    assert moments_of([1.0], [3.0]).deviation == pytest.approx(2**0.5)


@pytest.mark.parametrize(("buffer", "penalties"), [(1, [0, 0, -1]), (3, [-1 / 3, -2 / 3, -1])])
def test_a_buffer_of_one_token_or_of_the_whole_limit_is_allowed(buffer, penalties):
    assert overlong_penalty(torch.tensor([1, 2, 3]), 3, buffer).tolist() == pytest.approx(penalties)
