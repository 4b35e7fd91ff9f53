"""Outcomes are read from the run's own files; a fault without evidence does not count as survived."""

import pytest

from chaos.faults import KILL
from chaos.kinds import KINDS
from chaos.kinds.checkpoints import SKIPPED
from chaos.kinds.failures import LEFT_OUT
from chaos.nan_injection import unrecovered
from chaos.outcomes import outcomes, to_inject_again, unnoticed
from rlhf_ray.errors import DiskStalled
from rlhf_ray.failpoints import EXIT_CODE


def only(fake_run):
    """The one outcome."""
    (outcome,) = outcomes(fake_run.record)
    return outcome


def test_a_worker_that_was_noticed_and_came_back_was_survived(fake_run):
    fake_run.start(100, 200, 0, 0)
    fake_run.injected("generator_kill", 110, role="generator", pid=7)
    fake_run.event("generator", 8, 105, 2.0)
    fake_run.event("generator", 7, 111.5, 6.0)
    outcome = only(fake_run)
    assert (outcome.survived, outcome.detection_s, outcome.recovery_s) == (True, 1.5, 6.0)


@pytest.mark.parametrize("log, event, problem", [
    ({"in_state": False}, True, "not in the required state"), ({"confirmed": False}, True, "neither died nor stopped"),
    ({}, False, "never noticed")])
def test_a_fault_without_evidence_was_not_survived(fake_run, log, event, problem):
    fake_run.start(100, 200, 0, 0)
    fake_run.injected("reward_kill", 110, role="reward_scorer", pid=7, **log)
    if event:
        fake_run.event("reward_scorer", 7, 111, 2.0)
    outcome = only(fake_run)
    assert problem in outcome.problem and outcome.injected and not outcome.survived


def test_one_that_never_came_back_was_not_survived(fake_run):
    fake_run.start(100, 200, 0, 0)
    fake_run.injected("assembler_kill", 110, role="assembler", pid=7)
    fake_run.event("assembler", 7, 111, None, "it cannot start any more")
    assert "it cannot start any more" in only(fake_run).problem


@pytest.mark.parametrize("kind, role, code", [("generator_stop", "generator", EXIT_CODE),
                                              ("policy_kill", "policy_learner", -KILL),
                                              ("generator_kill", "generator", DiskStalled.exit_code)])
def test_a_victim_that_a_driver_could_not_report_is_not_survived_and_proves_nothing(fake_run, kind, role, code):
    fake_run.start(100, 150, code, code)
    number = fake_run.injected(kind, 149, role=role, pid=7)
    assert unnoticed(fake_run.record) == {number}
    fake_run.start(160, 200, 0, 0)
    outcome = only(fake_run)
    assert not outcome.injected and not outcome.survived and "before it could notice" in outcome.problem


def test_a_fault_in_the_repair_of_another_is_injected_again_with_that_one(fake_run):
    fake_run.start(100, 150, EXIT_CODE, EXIT_CODE)
    killed = fake_run.injected("generator_kill", 140, role="generator", pid=7)
    fake_run.event("generator", 7, 141, 6.0)
    in_catch_up = fake_run.injected("policy_kill_in_catch_up", 149, role="policy_learner", pid=8)
    other = fake_run.injected("reward_stop", 149, role="reward_scorer", pid=9)
    assert unnoticed(fake_run.record) == {in_catch_up, other}
    assert to_inject_again(fake_run.record) == {killed, in_catch_up, other}


@pytest.mark.parametrize("code, ended, proves_nothing", [
    (74, 120, True), (74, 130, False), (0, 120, False), (68, 165, True), (68, 190, False)])
def test_a_driver_that_fails_at_once_need_not_have_noticed(fake_run, code, ended, proves_nothing):
    """Of another fault, such as a full disk; one that lives longer, or ends well, must have. One that loses its cluster
    ends late, and notices nothing else."""
    fake_run.start(100, ended, code, code)
    number = fake_run.injected("generator_kill", 110, role="generator", pid=7)
    assert unnoticed(fake_run.record) == ({number} if proves_nothing else set())


def test_a_fault_that_is_injected_again_counts_by_its_second_victim(fake_run):
    fake_run.start(100, 150, EXIT_CODE, EXIT_CODE)
    number = fake_run.injected("generator_kill", 149, role="generator", pid=7)
    fake_run.start(160, 200, 0, 0)
    fake_run.line("injected", 170, fault=number, kind="generator_kill", state="at work", in_state=True,
                  role="generator", pid=8)
    fake_run.event("generator", 8, 171, 6.0)
    assert unnoticed(fake_run.record) == set()
    assert only(fake_run).problem == "its victim neither died nor stopped", "only the first one was confirmed"
    fake_run.line("confirmed", 170, fault=number, state="gone", seconds=0.1)
    assert only(fake_run).survived


def test_two_learners_lost_have_an_event_each_whatever_their_roles(fake_run):
    fake_run.start(100, 200, 0, 0)
    for time in (110, 130):
        fake_run.injected("policy_kill", time, role="policy_learner", pid=int(time))
    fake_run.event("critic_learner", None, 112, 9.0)
    fake_run.event("policy_learner", None, 131, 8.0)
    assert [(o.detection_s, o.recovery_s, o.survived) for o in outcomes(fake_run.record)] == [
        (2, 9.0, True), (1, 8.0, True)]


def test_an_event_of_another_start_is_not_a_learner_s(fake_run):
    fake_run.start(100, 150, 0, 0)
    fake_run.start(160, 200, 0, 0)
    fake_run.injected("critic_kill", 149, role="critic_learner", pid=7)
    fake_run.event("critic_learner", None, 170, 9.0)
    assert "never noticed" in only(fake_run).problem


def test_a_driver_is_back_when_its_successor_s_loop_begins(fake_run):
    fake_run.start(100, 150, -KILL, -KILL)
    fake_run.start(160, 200, 0, 0)
    fake_run.injected("driver_kill", 149.9)
    fake_run.line("loop", 172, step=3)
    outcome = only(fake_run)
    assert outcome.survived and outcome.recovery_s == 22


@pytest.mark.parametrize("code, loop, problem", [(1, True, "ended with 1"), (-KILL, False, "was not resumed")])
def test_a_driver_that_ended_otherwise_or_for_good_was_not_survived(fake_run, code, loop, problem):
    fake_run.start(100, 150, code, -KILL)
    fake_run.injected("driver_kill", 149.9)
    if loop:
        fake_run.line("loop", 172, step=3)
    assert problem in only(fake_run).problem


@pytest.mark.parametrize("said, survived", [(f"{SKIPPED}: step_4", True), ("resuming after step 4", False)])
def test_damage_must_be_reported_by_the_next_start(fake_run, said, survived):
    fake_run.start(100, 150, -KILL, -KILL)
    fake_run.start(160, 200, 0, 0, said)
    fake_run.injected("checkpoint_flip", 155)
    assert only(fake_run).survived is survived


def test_a_fault_whose_state_was_never_reached_is_neither_injected_nor_survived(fake_run):
    fake_run.start(100, 200, 0, 0)
    fake_run.fault("critic_stop")
    outcome = only(fake_run)
    assert not outcome.injected and not outcome.survived


@pytest.mark.parametrize("events, problem", [
    ((), "it hit no request"), (("confirmed",), "no request succeeded"), (("confirmed", "recovered"), "")])
def test_a_service_s_fault_is_survived_when_a_later_request_succeeds(fake_run, events, problem):
    fake_run.start(100, 200, 0, 0)
    number = fake_run.injected("http_500", 110, confirmed=False)
    for time, event in zip((112, 115), events, strict=False):
        fake_run.line(event, time, fault=number)
    outcome = only(fake_run)
    assert problem in outcome.problem and outcome.survived is not bool(problem)
    assert outcome.recovery_s == (3 if not problem else None)


@pytest.mark.parametrize("said, survived", [("error: the disk of x ran full", True), ("Traceback", False)])
def test_a_full_disk_must_be_reported(fake_run, said, survived):
    fake_run.start(100, 150, 1, 1, said)
    fake_run.start(160, 200, 0, 0)
    fake_run.injected("disk_full", 140)
    fake_run.line("loop", 172, step=3)
    assert only(fake_run).survived is survived


@pytest.mark.parametrize("said", ["", f"step 3: 2 of the critic's 4 optimizer steps {LEFT_OUT}"])
def test_scores_that_are_too_large_must_have_left_steps_out(fake_run, said):
    fake_run.start(100, 200, 0, 0, said)
    number = fake_run.injected("http_largest", 110, confirmed=False)
    for time, event in ((112, "confirmed"), (113, "recovered")):
        fake_run.line(event, time, fault=number)
    assert only(fake_run).survived is bool(said)


@pytest.mark.parametrize("step, survived", [(3, True), (4, False)])
def test_a_nan_must_have_skipped_a_step_of_that_update(fake_run, step, survived):
    fake_run.start(100, 200, 0, 0, f"step {step}: 1 of the policy's 4 optimizer steps {LEFT_OUT}")
    number = fake_run.injected("loss_nan", 110, confirmed=False, role="policy_learner", rank=1)
    fake_run.line("confirmed", 112, fault=number, step=3)
    fake_run.line("recovered", 112.5, fault=number)
    outcome = only(fake_run)
    assert outcome.survived is survived and outcome.recovery_s == 0.5


@pytest.mark.parametrize("recovered", [112.5, 132.5])
def test_an_update_with_a_nan_that_is_broken_off_by_another_fault_is_made_again_without_it(fake_run, recovered):
    fake_run.start(100, 120, -KILL, -KILL)
    fake_run.start(125, 200, 0, 0)
    number = fake_run.injected("loss_nan", 110, confirmed=False, role="policy_learner", rank=1)
    fake_run.line("confirmed", 112, fault=number, step=3, rank_of=["policy_learner", 1])
    fake_run.line("loop", 130, step=2)
    assert unrecovered(fake_run.record.injections, "policy_learner", 1) == number
    assert unrecovered(fake_run.record.injections, "policy_learner", 0) is None
    fake_run.line("recovered", recovered, fault=number)
    assert unrecovered(fake_run.record.injections, "policy_learner", 1) is None
    assert only(fake_run).survived is (recovered > 130)


def test_of_a_run_that_was_interrupted_only_what_it_had_survived_counts(fake_run):
    fake_run.start(100, 150, -KILL, -KILL)
    fake_run.start(160, 200, -KILL, 0)
    fake_run.injected("driver_kill", 149.9)
    fake_run.line("loop", 172, step=3)
    fake_run.injected("generator_kill", 180, role="generator", pid=7)
    fake_run.event("generator", 7, 181.5, 6.0)
    fake_run.injected("reward_kill", 199, role="reward_scorer", pid=8)
    fake_run.fault("critic_stop")
    fake_run.record.interruption = KeyboardInterrupt()
    found = outcomes(fake_run.record)
    assert [(o.injected, o.survived) for o in found] == [(True, True), (True, True), (False, False), (False, False)]
    assert "interrupted" in found[2].problem and "interrupted" in found[3].problem


@pytest.mark.parametrize("events, kind, problem", [
    (("confirmed", "recovered"), "died", ""), (("confirmed", "recovered"), "hung", "counted as hung"),
    (("confirmed",), None, "did not go on"), ((), None, "was not stopped")])
def test_a_driver_that_was_stopped_goes_on_and_blames_no_worker(fake_run, events, kind, problem):
    fake_run.start(100, 200, 0, 0)
    number = fake_run.injected("driver_stop", 110, confirmed=False)
    for time, event in zip((121, 126), events, strict=False):
        fake_run.line(event, time, fault=number)
    if kind:
        fake_run.event("generator", 7, 123, 2.0, kind=kind)
    outcome = only(fake_run)
    assert problem in outcome.problem and outcome.survived is not bool(problem)


@pytest.mark.parametrize("recovery_s, time, survived", [(30.0, 140, True), (None, 140, False), (5.0, 115, False)])
def test_a_generator_hit_in_its_catch_up_must_be_back_afterwards(fake_run, recovery_s, time, survived):
    fake_run.start(100, 200, 0, 0)
    fake_run.injected("generator_kill", 105, role="generator", rank=0, pid=7)
    fake_run.injected("generator_kill_in_catch_up", 120, role="generator", rank=0, pid=8)
    fake_run.event("generator", 7, 106, recovery_s, time=time)
    assert outcomes(fake_run.record)[1].survived is survived


@pytest.mark.parametrize("loop, began, survived", [(150, 100, True), (170, 160, False), (None, 160, False)])
def test_learners_hit_in_their_restart_must_be_restarted_by_the_same_driver(fake_run, loop, began, survived):
    fake_run.start(100, 155, 0, 0)
    if began > 155:
        fake_run.start(began, 200, 0, 0)
    fake_run.injected("policy_kill_in_restart", 120, role="policy_learner", rank=0, pid=8)
    if loop:
        fake_run.line("loop", loop)
    assert only(fake_run).survived is survived


@pytest.mark.parametrize("outcome, survived", [
    ("not replaced yet, the others of generator go on: no node", True), ("caught up to version 3", False)])
def test_a_node_that_is_lost_for_good_must_be_done_without(fake_run, outcome, survived):
    fake_run.start(100, 200, 0, 0)
    fake_run.injected("node_lost_without_spare", 110, role="generator", pid=7)
    fake_run.event("generator", 7, 112, None, outcome)
    assert only(fake_run).survived is survived


def test_a_link_on_which_no_answer_was_slower_was_not_disturbed(fake_run):
    fake_run.start(100, 200, 0, 0)
    number = fake_run.injected("control_link_slow", 110, confirmed=False)
    fake_run.line("recovered", 131, fault=number)
    assert not only(fake_run).injected
    fake_run.line("confirmed", 130, fault=number)
    assert only(fake_run).survived


@pytest.mark.parametrize("kind", ["control_store_kill", "head_kill", "control_link_cut"])
@pytest.mark.parametrize("code, survived", [(68, True), (1, False)])
def test_a_driver_that_loses_the_head_must_end_so_that_it_is_resumed(fake_run, kind, code, survived):
    fake_run.start(100, 160, code, KINDS[kind].expected_code(None, code, ""))
    fake_run.injected(kind, 110)
    fake_run.line("loop", 190)
    assert only(fake_run).survived is survived


def test_a_victim_that_needed_no_memory_before_its_driver_ended_was_not_hit(fake_run):
    fake_run.start(100, 150, 75, 75)
    fake_run.start(150, 200, 0, 0)
    number = fake_run.injected("generator_out_of_memory", 110, confirmed=False, role="generator", pid=7)
    assert unnoticed(fake_run.record) == {number}
    fake_run.line("confirmed", 111, fault=number, state="killed by the kernel", seconds=1.0)
    assert unnoticed(fake_run.record) == set()
