"""Plans of faults: drawn from a seed, complete, and possible. Trials: which faults a run gets."""

from collections import Counter
from itertools import pairwise

import pytest

from chaos.campaign import RUNS, trials
from chaos.faults import Fault
from chaos.kinds import KINDS, kind_of, triples
from chaos.kinds.nodes import NodeFault
from chaos.nodes import SPARE_NODES
from chaos.plan import USUAL_MINUTES, plan, steps_for

RANKS = {"generator": 2, "policy_learner": 2}
ALL = tuple(KINDS)


def test_a_plan_is_determined_by_its_seed():
    assert plan(3, ALL, 40, RANKS, 3) == plan(3, ALL, 40, RANKS, 3) != plan(4, ALL, 40, RANKS, 3)


@pytest.mark.parametrize("kinds", [ALL, *(("checkpoint_flip",) * damages for damages in (2, 3, 5))],
                         ids=["all", "2_damages", "3_damages", "5_damages"])
def test_every_plan_is_complete_and_possible(kinds):
    """Whatever the seed: every kind is planned, and a checkpoint is damaged only after an end of the driver, when there
    are two new checkpoints."""
    steps = 60 if kinds == ALL else steps_for(kinds, 3)
    for seed in range(200):
        faults = plan(seed, kinds, steps, RANKS, 3)
        planned = Counter(fault.kind for fault in faults)
        assert Counter(kinds) <= planned, seed
        assert set(planned - Counter(kinds)) <= {"driver_kill", *(KINDS[kind].preceded_by for kind in kinds)}, seed
        assert [fault.number for fault in faults] == list(range(1, len(faults) + 1)), seed
        assert all(fault.rank < RANKS.get(kind_of(fault).role, 1) for fault in faults), seed
        ended = [kind_of(fault).at_the_end for fault in faults]
        assert ended == sorted(ended), seed
        assert max(fault.step for fault in faults if not kind_of(fault).at_the_end) < steps - 3, seed
        assert not kind_of(faults[0]).needs_no_driver, seed
        for before, fault in [(None, faults[0]), *pairwise(faults)]:
            needed = kind_of(fault).preceded_by
            assert not needed or (before and before.kind == needed), (seed, fault.kind)
        damages = [(before, fault) for before, fault in pairwise(faults) if kind_of(fault).checkpoints]
        for before, fault in damages:
            assert kind_of(before).ends_the_driver and before.step > 6 and fault.valid_checkpoints == 2, seed
        if kinds != ALL:
            assert all(later.step - earlier.step >= 6 for (_, earlier), (_, later) in pairwise(damages)), seed


def test_a_fault_that_lasts_has_its_updates_before_the_next():
    kinds = ("disk_slow", "http_500", "clock_back", "reward_stop", "disk_slow")
    for seed in range(50):
        for fault, later in pairwise(plan(seed, kinds, steps_for(kinds, 3), {}, 3)):
            assert later.during_repair or later.step - fault.step >= kind_of(fault).updates, seed


def test_damage_alone_adds_the_ends_of_the_driver_that_it_needs():
    faults = plan(1, ("checkpoint_flip", "checkpoint_delete"), 20, RANKS, 3)
    assert [kind_of(fault).follows_an_end for fault in faults] == [False, True] * 2


def test_a_fault_round_trips_through_json():
    fault = plan(1, ALL, 40, RANKS, 3)[5]
    assert Fault.from_dict(fault.as_dict()) == fault


def test_a_round_has_every_kind_and_at_least_65_that_differ():
    kinds = [kind for trial in trials(1, USUAL_MINUTES) for kind in trial.kinds]
    assert set(kinds) == set(KINDS) and len({KINDS[kind].triple for kind in kinds}) >= 65
    assert sum(sum(kind.runs.values()) for kind in KINDS.values()) == len(kinds)
    assert all(kind.runs and set(kind.runs) <= set(RUNS) for kind in KINDS.values())


def test_less_time_means_fewer_faults_of_each_kind_first():
    *_, short = trials(1, 0.99 * USUAL_MINUTES)
    wanted = {name: kind.runs["synchronous"] for name, kind in KINDS.items() if kind.runs.get("synchronous")}
    assert set(wanted) == set(short.kinds) and len(short.kinds) < sum(wanted.values())


def test_one_kind_alone():
    (trial,) = trials(1, USUAL_MINUTES, ["policy_stop"])
    assert set(trial.kinds) == {"policy_stop"} and trial.max_staleness == 0


def test_a_lost_node_alone_is_lost_where_there_are_several():
    on_nodes, others = trials(1, USUAL_MINUTES, ["policy_stop", "node_lost", "partition"])
    assert (others.run, on_nodes.run, on_nodes.kinds) == ("synchronous", "generator_nodes", ("node_lost", "partition"))


def test_no_run_loses_more_nodes_than_it_can_spare():
    for run, settings in RUNS.items():
        lost = sum(kind.runs.get(run, 0) for kind in KINDS.values() if isinstance(kind, NodeFault))
        spare = [SPARE_NODES[pool] for pool in settings.sections.get("pools", {}) if pool in SPARE_NODES]
        assert lost <= sum(spare) or spare == [0] == [lost - 1], run


def test_results_are_compared_where_no_fault_may_change_them():
    assert all(trial.reproducible is ("overlapped" not in trial.run) for trial in trials(1, USUAL_MINUTES))
    kinds = ("http_nan", "http_largest", "http_400")
    alone = {kind: trials(1, USUAL_MINUTES, [kind])[0].reproducible for kind in kinds}
    assert alone == {"http_nan": True, "http_largest": False, "http_400": False}


def test_what_is_not_possible_is_left_out_of_every_run():
    assert all("disk_full" not in trial.kinds for trial in trials(1, USUAL_MINUTES, not_tried={"disk_full": "no root"}))
    assert trials(1, USUAL_MINUTES, ["disk_full"], {"disk_full": "no root"}) == []


def test_kinds_with_the_same_victim_mechanism_and_state_are_one():
    """Ten ways in which one service fails are four kinds: no valid scores, scores that are late or come slowly, a cut
    connection."""
    assert len(triples(name for name in KINDS if name.startswith("http_"))) == 4
    others = [name for name in KINDS if not name.startswith("http_")]
    assert len(triples(others)) == len(others)


def test_some_faults_come_while_the_victim_of_the_one_before_is_replaced():
    """The victim is another worker, and the same update: otherwise the first is back before."""
    seconds = 0
    for seed in range(100):
        for first, second in pairwise(plan(seed, ALL, 60, RANKS, 3)):
            if second.during_repair:
                seconds += 1
                assert kind_of(first).is_repaired and first.step == second.step, seed
                assert (kind_of(first).role, first.rank) != (kind_of(second).role, second.rank), seed
    assert 4 <= seconds / 100 <= 15


def test_a_fault_inside_the_repair_of_another_one_follows_it_at_once():
    for name in (name for name, kind in KINDS.items() if kind.preceded_by):
        faults = plan(1, ("http_500", name, "reward_kill"), 20, RANKS, 3)
        ((first, second),) = [pair for pair in pairwise(faults) if pair[1].kind == name]
        assert first.kind == KINDS[name].preceded_by and first.step == second.step and not second.during_repair
