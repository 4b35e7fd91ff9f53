"""Which failures call for new learners, and how often."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.errors import RunInterrupted, WorkerError, WorkerLost
from rlhf_ray.observability.faults import FaultLog, read_faults
from rlhf_ray.workers.health_monitor import HealthMonitor
from rlhf_ray.workers.learner_restart import LearnerRestart
from tests.checkpoints import new_checkpoint


class Group:
    """Two workers, some of whom are not there any more."""

    def __init__(self, role, gone=()):
        self.role, self.gone, self.respawned = role, gone, []

    ranks = (0, 1)

    async def respawn(self, rank, reason):
        self.respawned.append(rank)

    def own_call(self, rank, method, deadline):
        async def done():
            if rank in self.gone:
                raise lost("policy", "died")

        return SimpleNamespace(done=done)


def lost(role, kind):
    error = WorkerLost(f"{role}/1 {kind}")
    error.role, error.kind = role, kind
    return error


def failed(role):
    error = WorkerError(f"{role}/0 failed in update: RuntimeError: Connection closed by peer")
    error.role = role
    return error


def setting(tmp_path, gone=(), lost_at_start=0, warn=lambda _: None, stop=None, **cluster):
    """A `LearnerRestart` whose first `lost_at_start` starts end with another lost learner; its store; its starts."""
    policy, critic, started = Group("policy", gone), Group("critic"), []

    async def start():
        assert policy.respawned[-2:] == critic.respawned[-2:] == [0, 1]
        started.append(True)
        if len(started) <= lost_at_start:
            raise lost("critic", "died")

    health, config = HealthMonitor(log=FaultLog(tmp_path / "faults.jsonl")), ClusterConfig(**cluster)
    health.register_learners([policy, critic])
    store = CheckpointStore(tmp_path, 2)
    restart = LearnerRestart(config.max_learner_restarts, health, [policy, critic], store, start, warn,
                             stop or StopRequest(warn))
    return restart, store, started


@pytest.mark.parametrize("error", [lost("policy", "died"), lost("critic", "stale"), failed("critic")], ids=str)
def test_any_failure_of_a_learner_calls_for_new_ones(tmp_path, error):
    restart, _, started = setting(tmp_path)
    asyncio.run(restart.after(error))
    assert started == [True]


@pytest.mark.parametrize("error", [lost("generator", "died"), failed("reward_scorer"), WorkerError("of nobody")],
                         ids=str)
def test_failures_of_others_are_not_its_business(tmp_path, error):
    restart, _, started = setting(tmp_path, gone=[1])
    with pytest.raises(WorkerError) as told:
        asyncio.run(restart.after(error))
    assert told.value is error and started == []


@pytest.mark.parametrize("gone", [[], [1]])
def test_a_result_that_others_miss_is_a_learner_s_loss_if_one_is_gone(tmp_path, gone):
    restart, _, started = setting(tmp_path, gone=gone)
    if gone:
        asyncio.run(restart.after(lost("assembler", "result")))
    else:
        with pytest.raises(WorkerLost, match="assembler/1 result"):
            asyncio.run(restart.after(lost("assembler", "result")))
    assert started == [True] * len(gone)


def commit(store, step):
    with new_checkpoint(store, step) as directory:
        (directory / "file").write_text("x")


def test_losses_without_a_checkpoint_in_between_are_bounded_and_a_checkpoint_begins_the_count_anew(tmp_path):
    restart, store, started = setting(tmp_path, max_learner_restarts=2)

    async def lose(times):
        for _ in range(times):
            await restart.after(lost("policy", "died"))

    asyncio.run(lose(2))
    commit(store, 4)
    asyncio.run(lose(2))
    with pytest.raises(WorkerError, match=r"lost 3 times since the checkpoint of step 4 .*restarts=2\).*policy/1"):
        asyncio.run(lose(1))
    assert len(started) == 4


def test_the_first_loss_can_be_one_too_many(tmp_path):
    restart, _, started = setting(tmp_path, max_learner_restarts=0)
    with pytest.raises(WorkerError, match="lost 1 times since the run began"):
        asyncio.run(restart.after(lost("policy", "died")))
    assert started == []


def test_a_learner_lost_while_it_is_built_again_is_built_once_more_within_the_bound(tmp_path):
    restart, _, started = setting(tmp_path, lost_at_start=1, max_learner_restarts=2)
    asyncio.run(restart.after(lost("policy", "died")))
    assert len(started) == 2
    with pytest.raises(WorkerError, match="lost 3 times since the run began.*policy/1 died"):
        asyncio.run(restart.after(lost("policy", "died")))
    assert len(started) == 2


def test_it_is_told_where_the_run_goes_on(tmp_path):
    warnings = []
    restart, store, _ = setting(tmp_path, warn=warnings.append, max_learner_restarts=2)
    asyncio.run(restart.after(lost("policy", "died")))
    commit(store, 7)
    asyncio.run(restart.after(lost("policy", "died")))
    assert [text.rpartition("continues from ")[2] for text in warnings] == ["the beginning", "the checkpoint of step 7"]


def outcomes(tmp_path):
    return [(event["role"], event["recovery_s"] is not None, event["outcome"])
            for event in read_faults(tmp_path / "faults.jsonl")]


def test_a_learner_lost_while_the_run_is_asked_to_stop_is_recorded_and_not_restarted(tmp_path):
    stop = StopRequest(lambda _: None)
    restart, _, started = setting(tmp_path, stop=stop)
    stop.ask("SIGTERM")
    with pytest.raises(RunInterrupted, match="stopped by SIGTERM when a worker was lost"):
        asyncio.run(restart.after(lost("policy", "stale")))
    with pytest.raises(RunInterrupted, match="stopped by SIGTERM when a worker was lost"):
        asyncio.run(restart.after(lost("generator", "died")))
    assert started == []
    assert outcomes(tmp_path) == [("policy", False, "the run ended before they were restarted: stopped by SIGTERM")]


def test_learners_that_are_being_restarted_when_the_run_ends_or_lost_too_often_are_recorded_too(tmp_path):
    restart, _, _ = setting(tmp_path, lost_at_start=9, max_learner_restarts=1)

    async def cancelled():
        task = asyncio.create_task(restart.after(lost("policy", "died")))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    with pytest.raises(WorkerError, match="without a new checkpoint"):
        asyncio.run(restart.after(lost("policy", "died")))
    (_, back, ended), (_, again, often) = outcomes(tmp_path)
    assert not back and not again and ended.endswith("restarted: CancelledError")
    assert "restarted: learners were lost 2 times since the run began" in often
