"""When a run is given up, and that a resumed one comes to the same verdict."""

import json

import pytest

from rlhf_ray.config.training_loop import MAX_PATIENCE, EarlyStopConfig
from rlhf_ray.coordinator.early_stop import EarlyStop

NAN = float("nan")


def watched(rows, **limits):
    """(the steps at which there was a reason, the watcher) after (kl, reward) of steps 1, 2, ..."""
    watcher, reasons = EarlyStop(EarlyStopConfig(**limits)), []
    for step, (kl, reward) in enumerate(rows, start=1):
        watcher.observe(step, kl, reward)
        if watcher.reason():
            reasons.append(step)
    return reasons, watcher


def kls(*values):
    return [(kl, 0.0) for kl in values]


def rewards(*values):
    return [(0.0, reward) for reward in values]


def test_without_limits_nothing_ends_a_run():
    assert watched([(1e9, -1e9), (NAN, NAN)] * 20)[0] == []


def test_kl_must_be_over_its_limit_for_as_many_steps_in_a_row():
    assert watched(kls(11, 12, 9, 11, 12, 13, 14), kl_above=10, patience=3)[0] == [6, 7]
    assert watched(kls(10, 10, 10), kl_above=10, patience=3)[0] == [], "at the limit is not above it"


def test_reward_is_measured_from_the_runs_first_steps():
    # The start is (1 + 3) / 2 = 2, so the limit is 2 - 1.5 = 0.5.
    found, _ = watched(rewards(1, 3, 0.4, 0.6, 0.4, 0.4), reward_below_start=1.5, patience=2)
    assert found == [6]
    assert watched(rewards(1, 3, 0.5, 0.5), reward_below_start=1.5, patience=2)[0] == []


def test_what_is_not_a_number_is_over_every_limit():
    assert watched(kls(NAN, 11), kl_above=10, patience=2)[0] == [2]
    assert watched(rewards(1, 1, NAN, NAN), reward_below_start=5, patience=2)[0] == [4]


def test_the_reason_names_metric_limit_steps_and_value():
    _, watcher = watched(kls(1, 11, 12.5), kl_above=10, patience=2)
    assert watcher.reason() == ("kl/sequence was above early_stop.kl_above=10 nats in each of the steps 2 to 3, and "
                                "12.5 in the last")
    _, watcher = watched(rewards(2, -3), reward_below_start=1, patience=1)
    assert watcher.reason() == ("reward/mean was more than early_stop.reward_below_start=1 below its start of 2 "
                                "in step 2, and -3 in the last")


@pytest.mark.parametrize("cut", range(8))
def test_a_resumed_run_is_given_up_at_the_same_step(cut):
    rows = list(zip((1, 11, 12, 3, 11, 12, 13, 14), (5, 6, 5, 1, 0, 0, 0, 0), strict=True))
    limits = {"kl_above": 10, "reward_below_start": 3, "patience": 3}
    whole, _ = watched(rows, **limits)
    assert whole == [6, 7, 8]  # reward in steps 4 to 6; KL joins it at 7
    first = watched(rows[:cut], **limits)[1]
    second = EarlyStop(EarlyStopConfig(**limits))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second == first
    found = []
    for step, (kl, reward) in enumerate(rows[cut:], start=cut + 1):
        second.observe(step, kl, reward)
        if second.reason():
            found.append(step)
    assert found == [step for step in whole if step > cut]


@pytest.mark.parametrize(("limits", "goes_on"), [
    ({"kl_above": 10, "patience": 2}, False), ({"kl_above": 20, "patience": 2}, True),
    ({"kl_above": 10, "patience": 1}, False), ({"kl_above": 10, "patience": 3}, True), ({}, True),
])
def test_a_resumed_run_is_judged_by_its_own_limits(limits, goes_on):
    _, stopped = watched(kls(1, 11, 12), kl_above=10, patience=2)
    again = EarlyStop(EarlyStopConfig(**limits))
    again.load_state_dict(stopped.state_dict())
    assert (again.reason() is None) is goes_on


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 5)])
def test_patience_may_change_as_if_it_had_been_so_from_the_start(before, after):
    """Both what is found and what is saved."""
    rows = rewards(4, 6, 8, 5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5)
    whole, always = watched(rows, reward_below_start=1.0, patience=after)
    assert whole != []
    _, first = watched(rows[:4], reward_below_start=1.0, patience=before)
    again = EarlyStop(EarlyStopConfig(reward_below_start=1.0, patience=after))
    again.load_state_dict(first.state_dict())
    found = []
    for step, (kl, reward) in enumerate(rows[4:], start=5):
        again.observe(step, kl, reward)
        if again.reason():
            found.append(step)
    assert found == [step for step in whole if step > 4]
    assert again.state_dict() == always.state_dict()


def test_the_state_stays_small():
    _, long = watched(kls(*range(3 * MAX_PATIENCE)), kl_above=10, patience=1)
    assert [len(long.state_dict()[name]) for name in ("kl", "reward", "start")] == [MAX_PATIENCE] * 3
