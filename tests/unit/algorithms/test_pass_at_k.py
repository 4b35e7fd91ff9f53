"""pass@k by hand, and against counting every subset."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.algorithms.pass_at_k import mean_pass_at_k, pass_at_k, powers_of_two


@pytest.mark.parametrize(("n", "c", "k", "expected"), [
    (1, 0, 1, 0.0), (1, 1, 1, 1.0),
    (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    (5, 2, 2, 0.7),  # 1 - C(3,2)/C(5,2) = 1 - 3/10
    (5, 4, 2, 1.0),  # two samples cannot both miss
])
def test_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_it_is_the_share_of_subsets_with_a_good_sample(numbers):
    n, c, k = numbers
    subsets = [any(i < c for i in chosen) for chosen in combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


def test_large_counts_stay_exact():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_is_refused(n, c, k):
    with pytest.raises(ValueError, match="needs 1 <= k|must lie between"):
        pass_at_k(n, c, k)


def test_problems_are_averaged_up_to_the_fewest_samples():
    found = mean_pass_at_k([(4, 1), (4, 0), (6, 6)])
    assert found == pytest.approx({1: (0.25 + 0 + 1) / 3, 2: (0.5 + 0 + 1) / 3, 4: (1.0 + 0 + 1) / 3})
    assert mean_pass_at_k([]) == {}


def test_powers_of_two():
    assert [powers_of_two(n) for n in (0, 1, 3, 4, 9)] == [[], [1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
