"""Plans of faults: drawn from a seed, complete, and possible. Trials: which faults a run gets."""

from collections import Counter
from itertools import pairwise

import pytest

from chaos.campaign import OVERLAPPED, SEVERAL_NODES, SYNCHRONOUS, trials
from chaos.faults import KINDS, Fault, fewest_steps, plan
from chaos.nodes import SPARE

RANKS = {"generator": 2, "policy_learner": 2}
ALL = tuple(KINDS)


def test_a_plan_is_determined_by_its_seed():
    assert plan(3, ALL, 40, RANKS, 3) == plan(3, ALL, 40, RANKS, 3) != plan(4, ALL, 40, RANKS, 3)


@pytest.mark.parametrize("kinds", [ALL, *(("checkpoint_flip",) * damages for damages in (2, 3, 5))],
                         ids=["all", "2_damages", "3_damages", "5_damages"])
def test_every_plan_is_complete_and_possible(kinds):
    """Whatever the seed: every kind is planned, and a checkpoint is damaged only after an end of the driver, when there
    are two new checkpoints."""
    steps = 40 if kinds == ALL else fewest_steps(kinds, 3)
    for seed in range(200):
        faults = plan(seed, kinds, steps, RANKS, 3)
        planned = Counter(fault.kind for fault in faults)
        assert Counter(kinds) <= planned, seed
        assert set(planned - Counter(kinds)) <= {"driver_kill"}, seed
        assert [fault.number for fault in faults] == list(range(1, len(faults) + 1)), seed
        assert all(fault.rank < RANKS.get(fault.details.role, 1) for fault in faults), seed
        assert max(fault.step for fault in faults) < steps - 3, seed
        assert faults[0].details.target != "checkpoint", seed
        damages = [(before, fault) for before, fault in pairwise(faults) if fault.details.target == "checkpoint"]
        for before, fault in damages:
            assert before.details.ends_the_driver and before.step > 6 and fault.valid_checkpoints == 2, seed
        if kinds != ALL:
            assert all(later.step - earlier.step >= 6 for (_, earlier), (_, later) in pairwise(damages)), seed


def test_damage_alone_adds_the_ends_of_the_driver_that_it_needs():
    faults = plan(1, ("checkpoint_flip", "checkpoint_delete"), 20, RANKS, 3)
    assert [fault.details.target for fault in faults] == ["driver", "checkpoint"] * 2


def test_a_fault_round_trips_through_json():
    fault = plan(1, ALL, 40, RANKS, 3)[5]
    assert Fault.from_dict(fault.as_dict()) == fault


def test_a_round_has_forty_faults_of_twelve_kinds_and_more():
    kinds = [kind for trial in trials(1, 15) for kind in trial.kinds]
    assert len(kinds) >= 40 and len(set(kinds)) >= 12
    assert sum(map(sum, (some.values() for some in (SYNCHRONOUS, OVERLAPPED, SEVERAL_NODES)))) == len(kinds)


def test_less_time_means_fewer_faults_of_each_kind_first():
    *_, short = trials(1, 14.6)
    assert set(SYNCHRONOUS) == set(short.kinds) and len(short.kinds) < sum(SYNCHRONOUS.values())


def test_one_kind_alone():
    (trial,) = trials(1, 15, ["policy_stop"])
    assert set(trial.kinds) == {"policy_stop"} and trial.max_staleness == 0


def test_a_lost_node_alone_is_lost_where_there_are_several():
    others, on_nodes = trials(1, 15, ["policy_stop", "node_lost", "partition"])
    assert (others.several_nodes, on_nodes.several_nodes, on_nodes.kinds) == (False, True, ("node_lost", "partition"))
    assert len(trials(1, 15, ["partition"])[0].kinds) <= SPARE


def test_results_are_compared_where_no_fault_may_change_them():
    on_nodes, overlapped, synchronous = trials(1, 15)
    assert synchronous.reproducible and on_nodes.reproducible and not overlapped.reproducible
    assert trials(1, 15, ["http_nan"])[0].reproducible and not trials(1, 15, ["http_largest"])[0].reproducible
    assert not trials(1, 15, ["http_400"])[0].reproducible
