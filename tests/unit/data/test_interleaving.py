"""Turns by weight: exact shares at every moment."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.data.cursor import Interleaving


def turns(weights: list[float], n: int) -> list[int]:
    taken, order = [0] * len(weights), []
    sources = Interleaving(weights)
    for _ in range(n):
        order.append(sources.next(taken))
        taken[order[-1]] += 1
    return order


@pytest.mark.parametrize(("weights", "order"), [
    ([1.0], [0, 0, 0]), ([1, 1], [0, 1, 0, 1]), ([3, 1], [0, 0, 1, 0, 0, 0, 1, 0]), ([1, 2, 1], [1, 0, 2, 1]),
])
def test_small_cases_by_hand(weights: list[float], order: list[int]):
    assert turns(weights, len(order)) == order


def test_weights_mean_the_decimals_they_are_written_as():
    assert turns([0.1, 0.2, 0.7], 400) == turns([1, 2, 7], 400)
    assert [turns([0.1, 0.2, 0.7], 1000).count(i) for i in range(3)] == [100, 200, 700]


@settings(deadline=None)
@given(weights=st.lists(st.integers(1, 1000).map(lambda w: w / 100), min_size=1, max_size=6), n=st.integers(1, 400))
def test_every_source_stays_within_one_turn_of_its_share_at_any_moment(weights: list[float], n: int):
    exact = [Fraction(str(w)) for w in weights]
    taken = [0] * len(weights)
    bound = 1 - Fraction(1, max(2 * len(weights) - 2, 1))
    for moment, source in enumerate(turns(weights, n), start=1):
        taken[source] += 1
        gaps = [abs(count - moment * share / sum(exact)) for count, share in zip(taken, exact, strict=True)]
        assert max(gaps) <= bound
