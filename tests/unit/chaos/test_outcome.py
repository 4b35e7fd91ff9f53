"""What became of a fault is told by the run's own files; without evidence none counts as survived."""

import pytest

from chaos.kinds import KILL
from chaos.outcome import LEFT_OUT, PASSED_OVER, outcomes
from rlhf_ray.failpoints import EXIT_CODE


def only(made_up):
    """The one outcome."""
    (outcome,) = outcomes(made_up.record)
    return outcome


def test_a_worker_that_was_noticed_and_came_back_was_survived(made_up):
    made_up.start(100, 200, 0, 0)
    made_up.struck("generator_kill", 110, role="generator", pid=7)
    made_up.event("generator", 8, 105, 2.0)
    made_up.event("generator", 7, 111.5, 6.0)
    outcome = only(made_up)
    assert (outcome.survived, outcome.detection_s, outcome.recovery_s) == (True, 1.5, 6.0)


@pytest.mark.parametrize("strike, event, problem", [
    ({"in_state": False}, True, "not in the state"), ({"confirmed": False}, True, "neither died nor stopped"),
    ({}, False, "never noticed")])
def test_a_fault_without_evidence_was_not_survived(made_up, strike, event, problem):
    made_up.start(100, 200, 0, 0)
    made_up.struck("reward_kill", 110, role="reward_scorer", pid=7, **strike)
    if event:
        made_up.event("reward_scorer", 7, 111, 2.0)
    outcome = only(made_up)
    assert problem in outcome.problem and outcome.injected and not outcome.survived


def test_one_that_never_came_back_was_not_survived(made_up):
    made_up.start(100, 200, 0, 0)
    made_up.struck("assembler_kill", 110, role="assembler", pid=7)
    made_up.event("assembler", 7, 111, None, "it cannot start any more")
    assert "it cannot start any more" in only(made_up).problem


def test_a_driver_that_died_tells_nothing_of_workers_that_were_down(made_up):
    made_up.start(100, 150, EXIT_CODE, EXIT_CODE)
    made_up.start(160, 200, 0, 0)
    made_up.struck("generator_stop", 149, role="generator", pid=7)
    outcome = only(made_up)
    assert outcome.survived and outcome.recovery_s is None


def test_two_learners_lost_have_an_event_each_whatever_their_roles(made_up):
    made_up.start(100, 200, 0, 0)
    for time in (110, 130):
        made_up.struck("policy_kill", time, role="policy_learner", pid=int(time))
    made_up.event("critic_learner", None, 112, 9.0)
    made_up.event("policy_learner", None, 131, 8.0)
    assert [(o.detection_s, o.recovery_s, o.survived) for o in outcomes(made_up.record)] == [
        (2, 9.0, True), (1, 8.0, True)]


def test_an_event_of_another_start_is_not_a_learner_s(made_up):
    made_up.start(100, 150, 0, 0)
    made_up.start(160, 200, 0, 0)
    made_up.struck("critic_kill", 149, role="critic_learner", pid=7)
    made_up.event("critic_learner", None, 170, 9.0)
    assert "never noticed" in only(made_up).problem


def test_a_driver_is_back_when_its_successor_s_loop_begins(made_up):
    made_up.start(100, 150, -KILL, -KILL)
    made_up.start(160, 200, 0, 0)
    made_up.struck("driver_kill", 149.9)
    made_up.line("loop", 172, step=3)
    outcome = only(made_up)
    assert outcome.survived and outcome.recovery_s == 22


@pytest.mark.parametrize("code, loop, problem", [(1, True, "ended with 1"), (-KILL, False, "did not go on")])
def test_a_driver_that_ended_otherwise_or_for_good_was_not_survived(made_up, code, loop, problem):
    made_up.start(100, 150, code, -KILL)
    made_up.struck("driver_kill", 149.9)
    if loop:
        made_up.line("loop", 172, step=3)
    assert problem in only(made_up).problem


@pytest.mark.parametrize("said, survived", [(f"{PASSED_OVER}: step_4", True), ("resuming after step 4", False)])
def test_damage_must_be_told_of_by_the_next_start(made_up, said, survived):
    made_up.start(100, 150, -KILL, -KILL)
    made_up.start(160, 200, 0, 0, said)
    made_up.struck("checkpoint_flip", 155)
    assert only(made_up).survived is survived


def test_a_fault_whose_moment_never_came_is_neither_injected_nor_survived(made_up):
    made_up.start(100, 200, 0, 0)
    made_up.fault("critic_stop")
    outcome = only(made_up)
    assert not outcome.injected and not outcome.survived


@pytest.mark.parametrize("events, problem", [
    ((), "no request met it"), (("confirmed",), "no request was answered well"), (("confirmed", "recovered"), "")])
def test_a_service_s_fault_is_survived_when_a_request_was_answered_well_afterwards(made_up, events, problem):
    made_up.start(100, 200, 0, 0)
    number = made_up.struck("http_500", 110, confirmed=False)
    for time, event in zip((112, 115), events, strict=False):
        made_up.line(event, time, fault=number)
    outcome = only(made_up)
    assert problem in outcome.problem and outcome.survived is not bool(problem)
    assert outcome.recovery_s == (3 if not problem else None)


@pytest.mark.parametrize("said, survived", [("error: the disk of x ran full", True), ("Traceback", False)])
def test_a_full_disk_must_be_told_of(made_up, said, survived):
    made_up.start(100, 150, 1, 1, said)
    made_up.start(160, 200, 0, 0)
    made_up.struck("disk_full", 140)
    made_up.line("loop", 172, step=3)
    assert only(made_up).survived is survived


@pytest.mark.parametrize("said", ["", f"step 3: 2 of the critic's 4 optimizer steps {LEFT_OUT}"])
def test_scores_that_are_too_large_must_have_left_steps_out(made_up, said):
    made_up.start(100, 200, 0, 0, said)
    number = made_up.struck("http_largest", 110, confirmed=False)
    for time, event in ((112, "confirmed"), (113, "recovered")):
        made_up.line(event, time, fault=number)
    assert only(made_up).survived is bool(said)


@pytest.mark.parametrize("step, survived", [(3, True), (4, False)])
def test_a_number_that_was_none_must_have_left_out_a_step_of_that_update(made_up, step, survived):
    made_up.start(100, 200, 0, 0, f"step {step}: 1 of the policy's 4 optimizer steps {LEFT_OUT}")
    number = made_up.struck("loss_nan", 110, confirmed=False, role="policy_learner", rank=1)
    made_up.line("confirmed", 112, fault=number, step=3)
    made_up.line("recovered", 112.5, fault=number)
    outcome = only(made_up)
    assert outcome.survived is survived and outcome.recovery_s == 0.5


def test_of_a_run_that_was_interrupted_only_what_it_had_got_over_counts(made_up):
    made_up.start(100, 150, -KILL, -KILL)
    made_up.start(160, 200, -KILL, 0)
    made_up.struck("driver_kill", 149.9)
    made_up.line("loop", 172, step=3)
    made_up.struck("generator_kill", 180, role="generator", pid=7)
    made_up.event("generator", 7, 181.5, 6.0)
    made_up.struck("reward_kill", 199, role="reward_scorer", pid=8)
    made_up.fault("critic_stop")
    made_up.record.interruption = KeyboardInterrupt()
    found = outcomes(made_up.record)
    assert [(o.injected, o.survived) for o in found] == [(True, True), (True, True), (False, False), (False, False)]
    assert "interrupted" in found[2].problem and "interrupted" in found[3].problem
