"""The order of a run's steps. Workers are stand-ins; pipeline, buffer and state are real."""

import asyncio
import errno
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_ray.algorithms.kl import AdaptiveKL
from rlhf_ray.config.training_loop import EarlyStopConfig, EvaluationConfig
from rlhf_ray.coordinator.early_stop import EarlyStop
from rlhf_ray.coordinator.recovery import SavePace
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.errors import (
    BufferError,
    CheckpointError,
    ConfigError,
    DiskStalled,
    LedgerError,
    RewardError,
    RunInterrupted,
    SupersededError,
    TrainingError,
    WorkerError,
)
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from rlhf_ray.replay.ledger_tables import OPEN
from tests.unit.coordinator.harnesses import CoordinatorHarness


def test_a_run_in_order(ppo_config, summary):
    config = ppo_config(prompts=4, steps=3, checkpoint={"every": 2}, evaluation=EvaluationConfig(prompts="e", every=2))
    run = CoordinatorHarness(config, summary)
    assert run.go() == [
        "evaluate 0", "policy 0", "critic 0", "publish 1",
        "policy 1", "critic 1", "publish 2", "evaluate 2", "save 2",
        "policy 2", "critic 2", "publish 3", "evaluate 3", "save 3",
    ]
    assert list(run.rows) == [1, 2, 3] and run.rows[3]["weights/version"] == 3
    assert (run.harness.state.step, run.harness.state.samples) == (3, 12)


def test_without_a_pace_saving_and_evaluating_happen_at_the_end(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=2, evaluation=EvaluationConfig(prompts="e")), summary)
    events = run.go()
    assert [e for e in events if e[:4] in ("save", "eval")] == ["evaluate 0", "evaluate 2", "save 2"]


def test_an_evaluation_that_is_the_best_is_saved_whenever_it_comes(ppo_config, summary):
    config = ppo_config(prompts=4, steps=4, checkpoint={"every": 2}, evaluation=EvaluationConfig(prompts="e", every=1))
    events = CoordinatorHarness(config, summary, best_at=(1, 4)).go()
    assert [e for e in events if e[:4] in ("save", "keep")] == ["save 1", "keep 1", "save 2", "save 4", "keep 4"]


def given_up(ppo_config, summary, kl_above, **arguments):
    """A run of 9 steps whose KL is 0.5 in every step, to be given up after 3 steps in a row over the limit."""
    config = ppo_config(prompts=4, steps=9, evaluation=EvaluationConfig(prompts="e"))
    run = CoordinatorHarness(config, summary, **arguments)
    run.harness.state.early_stop = EarlyStop(EarlyStopConfig(kl_above=kl_above, patience=3))
    return run


def test_a_run_that_went_wrong_ends_with_an_evaluation_and_a_checkpoint(ppo_config, summary):
    run = given_up(ppo_config, summary, kl_above=0.4)
    assert run.go()[-3:] == ["publish 3", "evaluate 3", "save 3"]
    assert run.coordinator.stopped_early.startswith("kl/sequence was above early_stop.kl_above=0.4 nats in each of")
    assert run.go()[-1] == "save 3" and run.events.count("save 3") == 1, "asked to go on it says the same again"


def test_a_run_within_its_limits_makes_all_its_steps(ppo_config, summary):
    run = given_up(ppo_config, summary, kl_above=0.6)
    assert run.go()[-1] == "save 9" and run.coordinator.stopped_early is None


def test_a_run_over_its_limit_in_its_last_step_has_not_ended_early(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=3), summary)
    run.harness.state.early_stop = EarlyStop(EarlyStopConfig(kl_above=0.4, patience=3))
    assert run.go()[-1] == "save 3" and run.coordinator.stopped_early is None


def test_the_policy_rests_while_the_critic_warms_up(ppo_config, summary):
    config = ppo_config(prompts=4, steps=3)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"critic_warmup_steps": 2})})
    run = CoordinatorHarness(config, summary)
    events = run.go()
    assert [e for e in events if e.startswith("policy")] == ["policy 2"]
    assert [e for e in events if e.startswith("critic")] == ["critic 0", "critic 1", "critic 2"]
    assert [e for e in events if e.startswith("publish")] == ["publish 1", "publish 2", "publish 3"]
    assert "policy/loss" not in run.rows[2] and "policy/loss" in run.rows[3]


def test_without_a_critic_the_policy_learns_alone(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=2), summary, critic=False)
    assert run.go()[1:] == ["policy 0", "publish 1", "policy 1", "publish 2", "save 2"]
    about = ("critic/", "share/critic", "time/critic_update", "time/values")
    assert not [name for name in run.rows[2] if name.startswith(about)]
    assert run.rows[2]["policy/loss"] == 1.0 and "time/logprobs" in run.rows[2]
    assert [name for name in run.rows[2] if name.startswith("share/policy")]


def test_a_policy_that_is_its_own_critic_speaks_for_both(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=2, critic={"backbone": "policy"}), summary, critic=False)
    assert run.go()[1:] == ["policy 0", "publish 1", "policy 1", "publish 2", "save 2"]
    row = run.rows[2]
    assert (row["policy/loss"], row["critic/loss"]) == (1.0, 2.0)
    assert not [name for name in row if name.startswith(("share/critic", "time/critic_update", "time/values"))]


def test_learners_get_the_step_the_policy_its_coefficient_and_both_the_experience(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, chunk=2, steps=1), summary)
    run.go()
    (_, step, coef, *policy), (_, other, *critic) = run.update_arguments
    assert (step, coef, other) == (0, 0.1, 0) and policy == critic and len(policy) == 2


def test_scores_that_were_trained_on_are_remembered(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, chunk=2, steps=2), summary)
    run.go()
    scores = run.harness.state.scores
    assert (scores.count, scores.mean) == (8, 0.5)  # every chunk of two scores 0 and 1


def test_a_request_to_stop_is_met_after_the_step_with_a_checkpoint(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary, stop_after=2)
    with pytest.raises(RunInterrupted, match="SIGTERM after step 2 of 5.*--resume"):
        run.go()
    assert run.events[-2:] == ["publish 2", "save 2"]


def test_a_request_is_met_although_the_next_batch_is_ready(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=50, staleness=3), summary, stop_after=2)
    publish = run.coordinator.weights.publish

    async def slowly(version):  # the lead fills up meanwhile
        await asyncio.sleep(0.1)
        return await publish(version)

    run.coordinator.weights.publish = slowly
    with pytest.raises(RunInterrupted, match="stopped by SIGTERM after step 2 of 50"):
        run.go()
    assert run.harness.buffer.stats().samples_ready >= 4


@pytest.mark.parametrize(("role", "saved"), [("generator", ["save 2"]), ("policy", [])])
def test_workers_that_cannot_be_kept_alive_end_the_run_with_what_is_done_saved(ppo_config, summary, role, saved):
    """But for learners: what these know is gone with them."""
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)
    publish = run.coordinator.weights.publish

    async def publish_and_lose(version):
        if version == 2:
            scheduler = run.harness.roles.dispatcher(run.harness.generators).scheduler
            scheduler.fail(WorkerError(f"{role}/0 was lost once more", role))
        return await publish(version)

    run.coordinator.weights.publish = publish_and_lose
    with pytest.raises(WorkerError, match="was lost once more"):
        run.go()
    assert [event for event in run.events if event.startswith("save")] == saved
    assert run.patience[0] == (None if saved else 300), "what is saved may take its time to be written"


@pytest.mark.parametrize("step", [0, 2])
def test_open_requests_before_an_update_end_the_run_with_the_last_step_saved_and_the_batch_ready(
        ppo_config, summary, step):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)

    async def require_idle():
        if run.harness.state.step == step:
            raise WorkerError("generator/1 has open requests", "generator")

    run.coordinator.weights.require_idle = require_idle
    with pytest.raises(WorkerError, match="generator/1 has open requests"):
        run.go()
    assert [event for event in run.events if event.startswith(("policy", "publish", "save"))][-2:] == (
        [f"publish {step}", f"save {step}"] if step else ["save 0"])
    assert run.harness.buffer.stats().samples_ready == 4 and not run.harness.buffer.leases()


def test_the_last_workers_own_error_saves_what_is_done_too(ppo_config, summary):
    """Such as a reward model that cannot be loaded again."""
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)
    publish, error = run.coordinator.weights.publish, RewardError("the service does not answer")

    async def publish_and_lose(version):
        if version == 2:
            run.harness.roles.health.irreplaceable_error = error
            run.harness.roles.dispatcher(run.harness.generators).scheduler.fail(error)
        return await publish(version)

    run.coordinator.weights.publish = publish_and_lose
    with pytest.raises(RewardError, match="does not answer"):
        run.go()
    assert [event for event in run.events if event.startswith("save")] == ["save 2"]


def test_workers_that_end_an_evaluation_end_it_with_the_step_saved(ppo_config, summary):
    config = ppo_config(prompts=4, steps=4, checkpoint={"every": 2}, evaluation=EvaluationConfig(prompts="e", every=2))
    run = CoordinatorHarness(config, summary)

    run.harness.state.unmeasured = False

    async def lost():
        raise WorkerError("generator/0 was lost once more", "generator")

    run.coordinator.evaluator.measure = lost
    with pytest.raises(WorkerError, match="was lost once more"):
        run.go()
    assert run.events[-1] == "save 2" and run.harness.state.unmeasured


def failing_score(run, error, at):
    """Have the reward raise `error` for the batch after step `at`; returns what it does otherwise."""
    score = run.harness.roles.reward.answer

    async def raising(rank, method, **records):
        if run.harness.state.step == at:
            raise error
        return await score(rank, method, **records)

    run.harness.roles.reward.answer = raising
    return score


def saves(run):
    return [event for event in run.events if event.startswith("save")]


def said(run):
    """What was said of an error that ends the run."""
    return [text for text in (*run.notes, *run.warnings) if text.startswith("an error ends the run")]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("error", [RewardError("the function raised"), ValueError("a bug")])
def test_an_error_of_a_batch_saves_the_last_step_and_is_raised(ppo_config, summary, error, staleness):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5, staleness=staleness), summary)
    failing_score(run, error, at=2)
    with pytest.raises(type(error)) as caught:
        run.go()
    last = run.harness.state.step
    assert last == 2 or staleness, "the next batch may have been ready"
    assert caught.value is error and run.events[-1] == f"save {last}" and len(saves(run)) == 1 and run.left == []
    assert said(run) == [f"an error ends the run; step {last} is saved, and --resume continues from it"]


def test_what_was_saved_after_an_error_goes_on_when_its_cause_is_fixed(ppo_config, summary):
    config = ppo_config(prompts=4, steps=4)
    whole, run = CoordinatorHarness(config, summary), CoordinatorHarness(config, summary)
    whole.go()
    score = failing_score(run, RewardError("the function raised"), at=2)
    with pytest.raises(RewardError):
        run.go()
    run.harness.roles.reward.answer, run.coordinator.stop = score, StopRequest(lambda _: None)

    async def go_on():
        for chunk in run.harness.buffer.under_way():
            run.harness.ledger.give_up(chunk.keys, "the process ended")
        run.coordinator.pipeline.resume()
        await asyncio.wait_for(run.coordinator.run(), 20)

    asyncio.run(go_on())
    trained = [sorted((role, step, *sorted(more)) for role, step, *more in each.update_arguments if role == "critic")
               for each in (whole, run)]
    assert trained[0] == trained[1] and len(trained[0]) == 4


def test_an_error_in_the_first_step_has_nothing_to_save(ppo_config, summary):
    """The directory holds no run then, and the same command starts it when the cause is fixed."""
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)
    failing_score(run, RewardError("the function raised"), at=0)
    with pytest.raises(RewardError):
        run.go()
    assert saves(run) == said(run) == []


@pytest.mark.parametrize("error", [
    DiskStalled("the disk hangs"), CheckpointError("the disk is full"), OSError(errno.ENOSPC, "no space"),
    LedgerError("a sample came twice"), BufferError("it has no batch"), SupersededError("another driver"),
    WorkerError("policy_learner/0 died", "policy"), WorkerError("who died?")])
def test_errors_of_disk_ledger_owner_and_learners_save_nothing(ppo_config, summary, error):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)
    failing_score(run, error, at=2)
    with pytest.raises(type(error)):
        run.go()
    assert saves(run) == said(run) == []


def test_an_error_of_an_update_or_a_publication_saves_nothing(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary, fail_at=2)
    with pytest.raises(TrainingError):
        run.go()
    assert saves(run) == []
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)

    async def failing(version):
        raise ValueError("a bug")

    run.coordinator.weights.publish = failing
    with pytest.raises(ValueError, match="a bug"):
        run.go()
    assert saves(run) == []


def test_a_checkpoint_that_fails_too_is_reported_beside_the_error(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)
    failing_score(run, RewardError("the function raised"), at=2)

    async def full():
        raise CheckpointError("the disk is full")

    run.coordinator.recovery.save = full
    with pytest.raises(RewardError, match="the function raised"):
        run.go()
    assert said(run) == ["an error ends the run, and step 2 cannot be saved: the disk is full"]


def test_a_checkpoint_whose_writing_fails_when_an_error_ends_the_run_is_reported(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5, checkpoint={"every": 2}), summary)
    failing_score(run, RewardError("the function raised"), at=2)

    async def settled(wait=True):
        if wait:
            raise CheckpointError("the disk is full")

    run.coordinator.recovery.settled = settled
    with pytest.raises(RewardError, match="the function raised"):
        run.go()
    assert saves(run) == ["save 2"], "once"
    assert said(run) == ["an error ends the run, and step 2 cannot be saved: the disk is full"]


def test_a_state_that_its_ledger_contradicts_is_not_saved(ppo_config, summary):
    """An error may come between two changes that belong together."""
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)
    score = run.harness.roles.reward.answer

    async def between(rank, method, **records):
        if run.harness.state.step == 2:
            run.harness.buffer.under_way()[-1].keys = []
            raise ValueError("a bug")
        return await score(rank, method, **records)

    run.harness.roles.reward.answer = between
    with pytest.raises(ValueError, match="a bug"):
        run.go()
    assert saves(run) == []
    assert "step 2: its ledger and its state disagree on" in said(run)[0]


@pytest.mark.parametrize("part", ["measure", "consider"])
def test_an_error_of_an_evaluation_saves_its_step_which_a_resumed_run_evaluates(ppo_config, summary, part):
    config = ppo_config(prompts=4, steps=4, evaluation=EvaluationConfig(prompts="e", every=2))
    run = CoordinatorHarness(config, summary)
    owner = run.coordinator.evaluator if part == "measure" else run.coordinator.best
    whole, error = getattr(owner, part), ConfigError("'gold' is not a metric of this run")

    async def failing_measure():
        if run.harness.state.step == 2:
            raise error
        return await whole()

    def failing_consider(step, metrics):
        if step == 2:
            raise error
        return whole(step, metrics)

    setattr(owner, part, failing_measure if part == "measure" else failing_consider)
    with pytest.raises(ConfigError):
        run.go()
    assert run.events[-1] == "save 2" and run.harness.state.unmeasured
    assert [event for event in run.events if event.startswith("evaluate")] == ["evaluate 0"]


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


def timed_run(ppo_config, summary, clock, minutes, staleness=0, took_s=0.0, **sections):
    """A run whose steps take a minute of that clock's time, and whose checkpoints take `took_s`."""
    run = CoordinatorHarness(ppo_config(prompts=4, steps=8, staleness=staleness, **sections), summary)
    publish, save = run.coordinator.weights.publish, run.coordinator.recovery.save
    pace = run.coordinator.pace = SavePace(minutes, clock)

    async def slowly(version):
        clock.now += 60
        return await publish(version)

    async def timed_save():
        pace.begin()
        clock.now += took_s
        await save()
        pace.end()

    run.coordinator.weights.publish, run.coordinator.recovery.save = slowly, timed_save
    return run


@pytest.mark.parametrize(("minutes", "took_s", "every", "saved"), [
    (3, 0, 0, [3, 6, 8]),
    (0, 0, 0, [8]),
    (3, 0, 2, [2, 4, 6, 8]),  # the last one, whatever its reason, begins the time anew
    (3, 0, 5, [3, 5, 8]),
    (1, 12, 0, [1, 5, 8]),  # 20 times 12 s are four minutes, of which the writing is a part
    (60, 0, 0, [8]),
])
def test_checkpoints_by_time_come_besides_those_by_steps(ppo_config, summary, minutes, took_s, every, saved):
    run = timed_run(ppo_config, summary, Clock(), minutes, took_s=took_s, checkpoint={"every": every})
    run.go()
    assert saves(run) == [f"save {step}" for step in saved]


def test_no_checkpoint_by_time_while_one_is_under_way():
    clock = Clock()
    pace = SavePace(1, clock)
    pace.begin()
    clock.now = 3600
    assert not pace.due
    pace.end()
    assert not pace.due, "it took an hour"
    clock.now = 20 * 3600
    assert pace.due


@pytest.mark.parametrize("staleness", [0, 2])
def test_checkpoints_by_time_change_neither_batches_nor_rows(ppo_config, summary, staleness):
    """They are decided before new chunks are admitted, so none is admitted between the decision and the checkpoint."""
    runs = [timed_run(ppo_config, summary, Clock(), minutes, staleness) for minutes in (0, 0.001)]
    for run in runs:
        run.go()
    assert [len(saves(run)) for run in runs] == [1, 8]
    if not staleness:
        trained = [[row for row in run.update_arguments if row[0] == "critic"] for run in runs]
        assert trained[0] == trained[1]
        rows = [{step: {name: row[name] for name in ("reward/mean", "kl/sequence", "staleness/max")}
                 for step, row in run.rows.items()} for run in runs]
        assert rows[0] == rows[1]
    assert max(row["staleness/max"] for row in runs[1].rows.values()) <= staleness


def test_a_resumed_run_that_is_stopped_before_its_first_step_does_not_save_it_again(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5), summary)
    run.coordinator.saved_at = 0  # as `restore_checkpoint` sets it
    run.stop.ask("SIGTERM")
    with pytest.raises(RunInterrupted, match="after step 0 of 5"):
        run.go()
    assert "save 0" not in run.events


def test_a_request_in_the_last_step_changes_nothing(ppo_config, summary):
    assert CoordinatorHarness(ppo_config(prompts=4, steps=2), summary, stop_after=2).go()[-1] == "save 2"


def test_a_request_before_the_first_step_saves_it_for_later(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5, evaluation=EvaluationConfig(prompts="e")), summary)
    run.stop.ask("SIGINT")
    with pytest.raises(RunInterrupted, match="stopped by SIGINT after step 0 of 5"):
        run.go()
    assert run.events[-1] == "save 0" and not [e for e in run.events if e.startswith("policy")]


@pytest.mark.parametrize("every", [0, 2])
def test_an_evaluation_that_was_cut_short_is_made_by_the_resumed_run(ppo_config, summary, every):
    config = ppo_config(prompts=4, steps=4, checkpoint={"every": every},
                        evaluation=EvaluationConfig(prompts="e", every=2))
    run = CoordinatorHarness(config, summary, stop_in_evaluation=2, best_at=(2,))
    with pytest.raises(RunInterrupted, match="after step 2 of 4"):
        run.go()
    assert run.events[-2:] == ["publish 2", "save 2"] and run.harness.state.unmeasured
    run.events.clear()
    run.coordinator.stop, run.stop_in_evaluation = StopRequest(lambda _: None), None

    async def go_on():
        for chunk in run.harness.buffer.under_way():
            run.harness.ledger.give_up(chunk.keys, "the process ended")
        run.coordinator.pipeline.resume()
        await asyncio.wait_for(run.coordinator.run(), 20)

    asyncio.run(go_on())
    assert run.events[:4] == ["evaluate 2", "save 2", "keep 2", "policy 2"]


def test_what_was_measured_is_not_measured_again(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=2, evaluation=EvaluationConfig(prompts="e")), summary)
    run.harness.state.unmeasured = False
    assert [e for e in run.go() if e.startswith("evaluate")] == ["evaluate 2"]


def test_a_checkpoint_that_is_there_already_is_not_written_twice(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=5, checkpoint={"every": 2}), summary, stop_after=2)
    with pytest.raises(RunInterrupted):
        run.go()
    assert run.events.count("save 2") == 1


@pytest.mark.parametrize(("warmup", "skipped", "moved"), [
    (0, (), [1, 2, 3]), (2, (), [3]), (0, (("policy", 1),), [1, 3])])
def test_the_adaptive_coefficient_moves_with_the_policy_only(ppo_config, summary, warmup, skipped, moved):
    """It would decay while the policy, which does not move, is no farther from the reference."""
    config = ppo_config(prompts=4, steps=3)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(
        update={"critic_warmup_steps": warmup})})
    run, steps = CoordinatorHarness(config, summary, skipped=skipped), []
    controller = SimpleNamespace(value=0.1, update=lambda kl, n: steps.append(run.harness.state.step),
                                 state_dict=dict)
    run.harness.state.kl = controller
    run.go()
    assert steps == moved


def test_a_failure_leaves_nothing_under_way(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, staleness=1, steps=9), summary, fail_at=1)
    with pytest.raises(TrainingError, match="not finite"):
        run.go()
    assert run.left == []


def test_a_checkpoint_under_way_is_waited_for_no_longer_than_a_lease_when_a_worker_is_lost(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=3, cluster={"heartbeat_timeout_s": 7}), summary)

    async def lost(version):
        raise WorkerError("policy_learner/1 died in weight_bucket")

    run.coordinator.weights.publish = lost
    with pytest.raises(WorkerError):
        run.go()
    assert run.patience[0] == 7


def test_the_adaptive_coefficient_moves_with_the_batchs_mean_kl_and_the_row_tells_the_one_used(ppo_config, summary):
    run, observed = CoordinatorHarness(ppo_config(prompts=4, steps=2), summary), []

    class Controller:
        value = 0.1

        def update(self, kl, samples):
            observed.append((kl, samples))
            self.value *= 2

    run.harness.state.kl = Controller()
    run.go()
    assert observed == [(0.5, 4), (0.5, 4)]
    assert [run.rows[step]["kl/coef"] for step in (1, 2)] == [0.1, 0.2]


def test_the_adaptive_coefficient_follows_the_mean_over_samples_and_counts_them(ppo_config, summary):
    """Ziegler et al. 2019, section 2.2, worked out by hand: three prompts of two samples each, in a chunk of four and
    one of two, whose samples have a KL of 1 and of 4 nats: 2 in the mean, and 2.5 in the mean of the chunks' means."""
    config = ppo_config(chunk=4, steps=1)
    loop = config.coordinator.model_copy(update={"prompts_per_step": 3, "samples_per_prompt": 2})

    def with_kl(keys, version=0):
        return summary(keys, version, kl=np.full(len(keys), 1.0 if len(keys) == 4 else 4.0, dtype=np.float32))

    run = CoordinatorHarness(config.model_copy(update={"coordinator": loop}), with_kl)
    run.harness.state.kl = AdaptiveKL(0.1, target=1.9, horizon=100)
    run.go()
    assert run.harness.state.kl.value == pytest.approx(0.1 * (1 + (2.0 / 1.9 - 1) * 6 / 100), rel=1e-12)


@pytest.mark.parametrize("alarm, warnings", [(0.12, 2), (0.13, 0)])
def test_generators_and_learner_that_disagree_raise_an_alarm(ppo_config, summary, alarm, warnings):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=2, weights={"logprob_gap_alarm": alarm}), summary)
    run.go()
    assert len(run.warnings) == warnings
    if warnings:
        assert "more than 0.12 nats (weights.logprob_gap_alarm) at one token of a hundred" in run.warnings[0]


def test_a_batch_that_changed_nothing_is_not_applied_and_teaches_the_controllers_nothing(ppo_config, summary):
    run = CoordinatorHarness(ppo_config(prompts=4, steps=3), summary,
                             skipped=[("policy", 0), ("policy", 1), ("critic", 1)])
    run.go()
    with closing(open_for_reading(run.harness.pipeline.ledger.path)) as db:
        told = dict(db.execute("SELECT step, state FROM samples GROUP BY step"))
        assert audit(db, ended=False) == []
    assert told == {1: "consumed", 2: "not_applied", 3: "consumed"}
    assert run.harness.state.scores.count == 8, "of 12 samples"
    assert [(run.rows[n]["policy/skipped_steps"], run.rows[n]["critic/skipped_steps"]) for n in (1, 2, 3)] == [
        (1, 0), (1, 1), (0, 0)]
    told = [text for text in run.warnings if "left out" in text]
    assert told[0].startswith("step 1: 1 of the policy's 1 optimizer steps left out")
    assert "policy's 1 optimizer steps and 1 of the critic's" in told[1] and len(told) == 2


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_run_that_is_stopped_knows_every_sample_that_is_open_by_the_ledger(ppo_config, summary, staleness):
    run = CoordinatorHarness(ppo_config(prompts=4, chunk=2, staleness=staleness, steps=9), summary, stop_after=2)
    with pytest.raises(RunInterrupted):
        run.go()
    ledger = run.harness.pipeline.ledger
    with closing(open_for_reading(ledger.path)) as db:
        marks = ", ".join("?" * len(OPEN))
        found = db.execute(f"SELECT epoch, row, sample FROM samples WHERE state IN ({marks})", OPEN).fetchall()
    known = [key.numbers for key in run.coordinator.open_keys()]
    assert sorted(known) == sorted(found) and len(found) >= 4
