"""Who waited for whom, exact on spans made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ray.observability.bottleneck import BUSY, COORDINATOR, bottleneck, recommend, waiting_shares
from rlhf_ray.observability.spans import Span

ROLES = {"generator": 2, "reward_scorer": 1, "policy_learner": 1}


def test_an_idle_worker_waits_for_the_nearest_busy_role_upstream():
    spans = [Span("generator", 0, 0, 6), Span("generator", 1, 0, 4), Span("reward_scorer", 0, 5, 7),
             Span("policy_learner", 0, 7, 9)]
    shares = waiting_shares(spans, 0, 10, ROLES)
    assert shares["generator"] == pytest.approx(
        {BUSY: 0.5, "generator": 0.05, "reward_scorer": 0.15, "policy_learner": 0.2, COORDINATOR: 0.1})
    assert shares["reward_scorer"] == pytest.approx(
        {"generator": 0.5, BUSY: 0.2, "policy_learner": 0.2, COORDINATOR: 0.1})
    assert shares["policy_learner"] == pytest.approx(
        {"generator": 0.5, "reward_scorer": 0.2, BUSY: 0.2, COORDINATOR: 0.1})


def test_roles_of_one_station_wait_for_what_is_upstream_before_each_other():
    spans = [Span("policy_learner", 0, 0, 6), Span("critic_learner", 0, 0, 4), Span("assembler", 0, 5, 6)]
    shares = waiting_shares(spans, 0, 6, {"policy_learner": 1, "critic_learner": 1, "assembler": 1})
    assert shares["critic_learner"] == pytest.approx({BUSY: 4 / 6, "policy_learner": 1 / 6, "assembler": 1 / 6})


def test_overlapping_calls_of_one_worker_count_once_and_spans_are_cut_at_the_window():
    spans = [Span("generator", 0, -5, 3), Span("generator", 0, 1, 2), Span("generator", 0, 2, 20)]
    assert waiting_shares(spans, 0, 10, {"generator": 1}) == {"generator": {BUSY: 1.0}}


def test_without_work_all_wait_for_the_coordinator():
    assert waiting_shares([], 0, 1, {"generator": 3}) == {"generator": {COORDINATOR: 1.0}}
    with pytest.raises(ValueError, match="no time"):
        waiting_shares([], 1, 1, {"generator": 1})


SPANS = st.builds(lambda role, worker, start, length: Span(role, worker % ROLES[role], start, start + length),
                  st.sampled_from(list(ROLES)), st.integers(0, 1), st.floats(-5, 12), st.floats(0, 8))


@given(st.lists(SPANS, max_size=12))
def test_every_role_s_shares_sum_to_its_time(spans):
    for share in waiting_shares(spans, 0, 10, ROLES).values():
        assert sum(share.values()) == pytest.approx(1)
        assert all(s > 0 for s in share.values())


def test_the_bottleneck_is_the_busiest_role():
    shares = {"generator": {BUSY: 0.4}, "policy_learner": {BUSY: 0.5}, "reward_scorer": {}}
    assert bottleneck(shares) == "policy_learner"
    assert bottleneck({}) is None


@pytest.mark.parametrize(
    ("shares", "staleness", "publishing", "words"),
    [
        ({"generator": {BUSY: 0.5, "policy_learner": 0.45}, "policy_learner": {BUSY: 0.45, "generator": 0.5}}, 0, 0,
         r"take turns \(50% and 45% of the time\): coordinator.max_staleness=1 .* up to 1.9 times"),
        ({"generator": {BUSY: 0.97}, "policy_learner": {BUSY: 0.45, "generator": 0.5}}, 1, 0,
         r"generator limits the run \(busy 97%, others wait for it up to 50%\): more generators .*"
         r"; learners are idle for 55% of the time, so fewer of them \(policy.workers, critic.workers\) would do"),
        ({"generator": {BUSY: 0.3, "policy_learner": 0.7}, "policy_learner": {BUSY: 0.97, "generator": 0.03}}, 1, 0,
         r"policy_learner limits the run .*; generators are idle for 70% of the time"),
        ({"generator": {BUSY: 0.7, "policy_learner": 0.3}, "policy_learner": {BUSY: 0.5, "generator": 0.5}}, 1, 0,
         r"neither side is always busy \(generators 70%, learners 50% of the time\): coordinator.max_staleness=2"),
        ({"generator": {BUSY: 0.95}, "policy_learner": {BUSY: 0.93, "generator": 0.05}}, 1, 0, "in balance"),
        ({"generator": {BUSY: 0.5}, "policy_learner": {BUSY: 0.4}}, 0, 0.2, "publishing weights takes 20%"),
        ({"generator": {BUSY: 0.4, COORDINATOR: 0.3}, "policy_learner": {BUSY: 0.3, COORDINATOR: 0.3}}, 0, 0,
         "for 30% of the time no role works"),
        ({}, 0, 0, "nothing was measured"),
    ],
)
def test_the_recommendation_names_the_knob(shares, staleness, publishing, words):
    import re

    assert re.search(words, recommend(shares, staleness, publishing))
