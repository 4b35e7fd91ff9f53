"""The admission rule and the staleness bound it guarantees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.replay.staleness import AdmissionRule, in_time, is_fresh, staleness


def test_synchronous_run_admits_exactly_one_batch_per_version():
    rule = AdmissionRule(batch=8, max_staleness=0, concurrency=100)
    assert rule.allowance(version=0, accepted=0, running=0, generating=0) == 8
    assert rule.allowance(version=0, accepted=3, running=5, generating=0) == 0
    assert rule.allowance(version=1, accepted=8, running=0, generating=0) == 8


def test_staleness_admits_that_many_batches_ahead():
    rule = AdmissionRule(batch=8, max_staleness=2, concurrency=100)
    assert rule.allowance(version=0, accepted=0, running=0, generating=0) == 24
    assert rule.allowance(version=3, accepted=30, running=10, generating=0) == (2 + 3 + 1) * 8 - 40


def test_allowance_is_never_negative():
    rule = AdmissionRule(batch=4, max_staleness=0, concurrency=100)
    assert rule.allowance(version=0, accepted=9, running=9, generating=0) == 0


def test_generators_are_given_no_more_than_they_take():
    rule = AdmissionRule(batch=8, max_staleness=1, concurrency=6)
    assert rule.allowance(version=0, accepted=0, running=4, generating=2) == 4
    assert rule.allowance(version=0, accepted=0, running=14, generating=2) == 2
    assert rule.allowance(version=0, accepted=0, running=9, generating=7) == 0


@pytest.mark.parametrize(("places", "kept"), [
    ([], True), ([(2, 4), (2, 4)], True), ([(2, 4), (2, 4), (2, 4)], False), ([(2, 4), (2, 5), (2, 5), (2, 5)], True),
    ([(4, 4), (2, 5), (2, 4)], False), ([(4, 3)], False), ([(2, 5), (2, 5), (2, 4)], False),
])
def test_batches_in_order_are_in_time_when_each_sample_is_within_the_bound_at_its_turn(places, kept):
    """Batches of 4 from version 5 on, at most 1 version old: samples of version 4 must be in the first."""
    assert in_time(places, batch=4, version=5, max_staleness=1) is kept


def test_is_fresh_at_the_edges_of_the_bound():
    assert staleness(3, 5) == 2
    assert is_fresh(min_version=3, current_version=5, max_staleness=2)
    assert not is_fresh(min_version=2, current_version=5, max_staleness=2)
    assert is_fresh(min_version=5, current_version=5, max_staleness=0)
    assert not is_fresh(min_version=6, current_version=5, max_staleness=2)


@given(
    batch=st.integers(1, 5),
    eta=st.integers(0, 3),
    choices=st.lists(st.integers(0, 99), max_size=80),
)
def test_in_admission_order_nothing_older_than_the_bound_is_trained(batch, eta, choices):
    """Runs the rule against any interleaving of starting, finishing, dropping and updating."""
    rule = AdmissionRule(batch, eta, concurrency=100)
    version, next_order = 0, 0
    running: dict[int, int] = {}
    ready: dict[int, int] = {}
    for choice in choices:
        allowed = rule.allowance(version, version * batch + len(ready), len(running), 0)
        if choice % 4 == 0 and allowed:
            for _ in range(1 + choice % allowed):
                running[next_order] = version
                next_order += 1
        elif choice % 4 == 1 and running:
            order = sorted(running)[choice % len(running)]
            ready[order] = running.pop(order)
        elif choice % 4 == 2 and choice % 3 == 0 and ready:
            ready.pop(sorted(ready)[choice % len(ready)])
        front = sorted(running.keys() | ready.keys())[:batch]
        if len(front) == batch and all(order in ready for order in front):
            made_by = [ready.pop(order) for order in front]
            assert all(is_fresh(m, version, eta) for m in made_by), (made_by, version)
            version += 1
