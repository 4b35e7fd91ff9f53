"""Win rates by hand, and Wilson's interval by its definition."""

from math import nan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.algorithms.win_rate import Z95, outcome, outcome_or_failed, wilson_interval, win_rate


@pytest.mark.parametrize(("first", "second", "tie", "expected"), [
    (1.0, 2.0, 0.0, "win"), (2.0, 1.0, 0.0, "loss"), (1.0, 1.0, 0.0, "tie"), (1.0, 1.5, 0.5, "tie"),
    (1.0, 1.6, 0.5, "win"),
])
def test_outcomes(first, second, tie, expected):
    assert outcome(first, second, tie) == expected


def test_a_score_that_is_no_number_decides_nothing():
    with pytest.raises(ValueError, match="cannot be compared"):
        outcome(float("nan"), 1.0)


@pytest.mark.parametrize(("first", "second", "expected"), [
    (nan, -5.0, "win"), (-5.0, nan, "loss"), (nan, nan, "tie"), (1.0, 2.0, "win"), (1.0, 1.05, "tie")])
def test_an_episode_that_failed_loses_against_any_score(first, second, expected):
    assert outcome_or_failed(first, second, tie=0.1) == expected


def test_ties_are_half_a_win_and_every_prompt_counts_once():
    found = win_rate([["win", "win"], ["tie", "loss"], ["loss"]])
    assert (found.wins, found.ties, found.losses) == (2, 1, 2)
    assert found.rate == pytest.approx((1.0 + 0.25 + 0.0) / 3)
    assert (found.low, found.high) == wilson_interval(found.rate, 3), "three prompts, whatever their pairs"


def test_eight_of_ten_by_hand():
    # Solving |0.8 - p| = z sqrt(p (1 - p) / 10) for p.
    assert wilson_interval(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)


def test_agreement_is_not_certainty():
    assert wilson_interval(1.0, 10) == pytest.approx((10 / (10 + Z95**2), 1.0))
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, Z95**2 / (10 + Z95**2)))


@given(st.floats(0.01, 0.99), st.integers(1, 10_000))
def test_the_ends_solve_the_score_equation(rate, trials):
    for end in wilson_interval(rate, trials):
        assert abs(rate - end) == pytest.approx(Z95 * sqrt(end * (1 - end) / trials), rel=1e-6, abs=1e-9)


@given(st.lists(st.lists(st.sampled_from(["win", "tie", "loss"]), min_size=1, max_size=4), min_size=1, max_size=20))
def test_exchanging_the_sides_mirrors_everything(outcomes):
    other = {"win": "loss", "loss": "win", "tie": "tie"}
    a, b = win_rate(outcomes), win_rate([[other[o] for o in pairs] for pairs in outcomes])
    assert (a.wins, a.ties, a.losses) == (b.losses, b.ties, b.wins)
    assert (a.rate, a.low, a.high) == pytest.approx((1 - b.rate, 1 - b.high, 1 - b.low))


@pytest.mark.parametrize("outcomes", [[], [["win"], []]])
def test_nothing_to_compare(outcomes):
    with pytest.raises(ValueError, match="at least one pair"):
        win_rate(outcomes)


def test_rounding_does_not_push_an_end_out_of_0_to_1():
    # Unbounded, these are 1 + 2e-16 and -1e-17.
    assert wilson_interval(1.0, 16)[1] == 1.0
    assert wilson_interval(0.0, 21)[0] == 0.0
