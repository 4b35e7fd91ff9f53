"""Which failures call for new learners, and how often."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.rebuilding import Rebuilding
from rlhf_ray.errors import WorkerError, WorkerLost
from tests.checkpoints import new_checkpoint


class Group:
    """Two workers, some of whom are not there any more."""

    def __init__(self, role, gone=()):
        self.role, self.gone, self.respawned = role, gone, []

    def __len__(self):
        return 2

    async def respawn(self, rank, reason):
        self.respawned.append(rank)

    def call(self, rank, method, timeout_s):
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


def setting(tmp_path, gone=(), lost_at_start=0, warn=lambda _: None, **cluster):
    """A `Rebuilding` whose first `lost_at_start` starts end with another lost learner; its store; its starts."""
    policy, critic, started = Group("policy", gone), Group("critic"), []

    async def start():
        assert policy.respawned[-2:] == critic.respawned[-2:] == [0, 1]
        started.append(True)
        if len(started) <= lost_at_start:
            raise lost("critic", "died")

    roles = SimpleNamespace(learners=lambda: [policy, critic], trains=lambda role: role in ("policy", "critic"))
    store = CheckpointStore(tmp_path, 2)
    return Rebuilding(ClusterConfig(**cluster), roles, store, start, warn), store, started


@pytest.mark.parametrize("error", [lost("policy", "died"), lost("critic", "stale"), failed("critic")], ids=str)
def test_any_failure_of_a_learner_calls_for_new_ones(tmp_path, error):
    rebuilding, _, started = setting(tmp_path)
    asyncio.run(rebuilding.after(error))
    assert started == [True]


@pytest.mark.parametrize("error", [lost("generator", "died"), failed("reward_scorer"), WorkerError("of nobody")],
                         ids=str)
def test_failures_of_others_are_not_its_business(tmp_path, error):
    rebuilding, _, started = setting(tmp_path, gone=[1])
    with pytest.raises(WorkerError) as told:
        asyncio.run(rebuilding.after(error))
    assert told.value is error and started == []


@pytest.mark.parametrize("gone", [[], [1]])
def test_a_result_that_others_miss_is_a_learner_s_loss_if_one_is_gone(tmp_path, gone):
    rebuilding, _, started = setting(tmp_path, gone=gone)
    if gone:
        asyncio.run(rebuilding.after(lost("assembler", "result")))
    else:
        with pytest.raises(WorkerLost, match="assembler/1 result"):
            asyncio.run(rebuilding.after(lost("assembler", "result")))
    assert started == [True] * len(gone)


def commit(store, step):
    with new_checkpoint(store, step) as directory:
        (directory / "file").write_text("x")


def test_losses_without_a_checkpoint_in_between_are_bounded_and_a_checkpoint_begins_the_count_anew(tmp_path):
    rebuilding, store, started = setting(tmp_path, max_rebuilds=2)

    async def lose(times):
        for _ in range(times):
            await rebuilding.after(lost("policy", "died"))

    asyncio.run(lose(2))
    commit(store, 4)
    asyncio.run(lose(2))
    with pytest.raises(WorkerError, match="lost 3 times since the checkpoint of step 4 .*max_rebuilds=2.*policy/1 d"):
        asyncio.run(lose(1))
    assert len(started) == 4


def test_the_first_loss_can_be_one_too_many(tmp_path):
    rebuilding, _, started = setting(tmp_path, max_rebuilds=0)
    with pytest.raises(WorkerError, match="lost 1 times since the run began"):
        asyncio.run(rebuilding.after(lost("policy", "died")))
    assert started == []


def test_a_learner_lost_while_it_is_built_again_is_built_once_more_within_the_bound(tmp_path):
    rebuilding, _, started = setting(tmp_path, lost_at_start=1, max_rebuilds=2)
    asyncio.run(rebuilding.after(lost("policy", "died")))
    assert len(started) == 2
    with pytest.raises(WorkerError, match="lost 3 times since the run began.*policy/1 died"):
        asyncio.run(rebuilding.after(lost("policy", "died")))
    assert len(started) == 2


def test_it_is_told_where_the_run_goes_on(tmp_path):
    warnings = []
    rebuilding, store, _ = setting(tmp_path, warn=warnings.append, max_rebuilds=2)
    asyncio.run(rebuilding.after(lost("policy", "died")))
    commit(store, 7)
    asyncio.run(rebuilding.after(lost("policy", "died")))
    assert [text.rpartition("continues from ")[2] for text in warnings] == ["the beginning", "the checkpoint of step 7"]
