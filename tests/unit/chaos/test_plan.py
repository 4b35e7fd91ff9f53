"""Plans of faults: drawn from a seed, complete, and possible."""

from collections import Counter
from itertools import pairwise

import pytest

from chaos.campaign import OVERLAPPED, SCATTERED, SYNCHRONOUS, trials
from chaos.kinds import KINDS
from chaos.nodes import SPARE
from chaos.plan import Fault, fewest_steps, plan

RANKS = {"generator": 2, "policy_learner": 2}
ALL = tuple(KINDS)


def test_a_seed_names_a_plan_and_another_seed_another():
    assert plan(3, ALL, 40, RANKS, 3) == plan(3, ALL, 40, RANKS, 3) != plan(4, ALL, 40, RANKS, 3)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_asked_for_is_there_once_with_numbers_in_order(seed):
    faults = plan(seed, ALL, 40, RANKS, 3)
    assert Counter(fault.kind for fault in faults) == Counter(ALL)
    assert [fault.number for fault in faults] == list(range(1, len(ALL) + 1))
    assert all(fault.rank < RANKS.get(fault.what.role, 1) for fault in faults)


@pytest.mark.parametrize("seed", range(20))
def test_a_checkpoint_is_damaged_when_the_driver_is_down_and_there_is_another(seed):
    faults = plan(seed, ALL, 40, RANKS, 3)
    for before, fault in pairwise(faults):
        if fault.what.target == "checkpoint":
            assert before.what.ends_the_driver and before.step > 6
    assert faults[0].what.target != "checkpoint"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("damages", [2, 3, 5])
def test_between_two_damages_there_is_time_for_new_checkpoints(seed, damages):
    kinds = ("checkpoint_flip",) * damages
    steps = fewest_steps(kinds, 3)
    faults = plan(seed, kinds, steps, RANKS, 3)
    due = [fault.step for fault in faults if fault.what.target == "checkpoint"]
    assert due[0] > 6 and all(later - earlier >= 6 for earlier, later in pairwise(due)) and due[-1] < steps - 3
    assert all(fault.whole_checkpoints == 2 for fault in faults)


def test_damage_alone_brings_the_ends_of_the_driver_that_it_needs():
    faults = plan(1, ("checkpoint_flip", "checkpoint_delete"), 20, RANKS, 3)
    assert [fault.what.target for fault in faults] == ["driver", "checkpoint"] * 2


@pytest.mark.parametrize("seed", range(20))
def test_the_last_fault_is_due_before_the_run_ends(seed):
    assert max(fault.step for fault in plan(seed, ALL, 40, RANKS, 3)) < 40 - 3


def test_a_fault_survives_its_file():
    fault = plan(1, ALL, 40, RANKS, 3)[5]
    assert Fault.of(fault.plain()) == fault


def test_a_round_has_forty_faults_of_twelve_kinds_and_more():
    kinds = [kind for trial in trials(1, 15) for kind in trial.kinds]
    assert len(kinds) >= 40 and len(set(kinds)) >= 12
    assert sum(map(sum, (some.values() for some in (SYNCHRONOUS, OVERLAPPED, SCATTERED)))) == len(kinds)


def test_less_time_means_fewer_faults_of_each_kind_first():
    *_, short = trials(1, 14.6)
    assert set(SYNCHRONOUS) == set(short.kinds) and len(short.kinds) < sum(SYNCHRONOUS.values())


def test_one_kind_alone():
    (trial,) = trials(1, 15, ["policy_stop"])
    assert set(trial.kinds) == {"policy_stop"} and trial.max_staleness == 0


def test_a_lost_node_alone_is_lost_where_there_are_several():
    others, scattered = trials(1, 15, ["policy_stop", "node_lost", "partition"])
    assert (others.several_nodes, scattered.several_nodes, scattered.kinds) == (False, True, ("node_lost", "partition"))
    assert len(trials(1, 15, ["partition"])[0].kinds) <= SPARE


def test_results_are_compared_where_no_fault_may_change_them():
    scattered, overlapped, synchronous = trials(1, 15)
    assert synchronous.same and scattered.same and not overlapped.same
    assert trials(1, 15, ["http_nan"])[0].same and not trials(1, 15, ["http_largest"])[0].same
    assert not trials(1, 15, ["http_400"])[0].same
