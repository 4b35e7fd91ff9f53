"""A checkpoint in the middle of a run whose buffer holds finished and unfinished chunks, with stand-in workers."""

import asyncio
import tempfile
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import pytest

from rlhf_ray.algorithms.kl import FixedKL
from rlhf_ray.checkpoint.store import CheckpointStore
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.derived import experience_kind
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.coordinator.recovery import LEDGER, Recovery
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import ConfigError, WorkerError, WorkerLost
from rlhf_ray.records import SampleKey
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.ledger import Ledger, open_for_reading
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.roles.learner_state import SaveProgress
from tests.unit.coordinator.stand_ins import role_groups_of
from tests.unit.replay.ledgers import begin


class CheckpointedRoles:
    """Learners and an assembler that write and read small files; `loaded` says who read which. Parts are on disk when
    `disk` is set."""

    def __init__(self, critic=True):
        self.loaded, self.disk, self.asked = [], asyncio.Event(), 0
        self.disk.set()
        self.roles = role_groups_of(policy=self.learner("policy"), critic=self.learner("critic") if critic else None,
                            assembler=self.assembler)

    def learner(self, role):
        async def behave(rank, method, directory=""):
            path = type(self).path(directory)
            if method == "begin_save":
                path.mkdir(parents=True)
                (path / "weights").write_text(role)
            elif method == "save_progress":
                self.asked += 1
            else:
                self.loaded.append((path / "weights").read_text())
            return SaveProgress(self.disk.is_set(), (0, 0), "flush weights")

        return behave

    @staticmethod
    def path(text):
        from pathlib import Path

        return Path(text)

    async def assembler(self, rank, method, path, *experience):
        if method == "save":
            self.path(path).write_text(experience[0])
            return None
        return self.path(path).read_text()


FACTS = LedgerFacts(2, 1, 1, (20,), 3, True, (1.0,))


def setting(tmp_path, geometry=MappingProxyType({"policy.workers": 2}), critic=True):
    workers = CheckpointedRoles(critic)
    state, buffer = RunState(FixedKL(0.1), PromptCursor(20, 3, shuffle=True)), ReplayBuffer(8, None, 1)
    ledger = Ledger.create(Path(tempfile.mkdtemp(dir=tmp_path)) / "ledger.sqlite", FACTS)
    recovery = Recovery(CheckpointStore(tmp_path, 2), workers.roles, state, buffer, geometry, ledger)
    return workers, state, buffer, recovery


async def saved(recovery):
    """Where the checkpoint of the present step is, when it is there."""
    await recovery.save()
    await recovery.settled()
    return recovery.store.path(recovery.state.step)


def test_a_run_comes_back_with_its_waiting_experience_and_open_places(tmp_path, summary):
    keys = [SampleKey(0, row, 0) for row in range(6)]

    async def run():
        _, state, buffer, recovery = setting(tmp_path)
        state.step, state.samples = 3, 12
        buffer.evict(3)
        places = [buffer.reserve(2, 0) for _ in range(3)]
        for place, own in zip(places, (keys[:2], keys[2:4], keys[4:]), strict=True):
            place.keys = own
        places[1].fill("experience of 2 and 3", 3, 20, summary(keys[2:4], version=3))
        buffer.commit(places[1])
        where = await saved(recovery)
        assert where == tmp_path / "step_3" and where.is_dir()

        workers, again, other, restored = setting(tmp_path)
        await restored.restore(where)
        return workers, again, other, [await chunk.experience for chunk in other.ready()]

    workers, again, buffer, refs = asyncio.run(run())
    assert sorted(workers.loaded) == ["critic", "policy"]
    assert (again.step, again.samples) == (3, 12)
    assert {chunk.place.order: chunk.keys for chunk in buffer.under_way()} == {0: keys[:2], 2: keys[4:]}
    assert refs == ["experience of 2 and 3"]
    (chunk,) = buffer.ready()
    assert chunk.keys == keys[2:4]
    assert chunk.summary.min_version == 3 and chunk.summary.scores.tolist() == [0, 1]


def test_without_a_critic_none_is_saved_and_none_comes_back(tmp_path):
    async def run():
        *_, recovery = setting(tmp_path, critic=False)
        where = await saved(recovery)
        workers, *_, restored = setting(tmp_path, critic=False)
        await restored.restore(where)
        return where, workers.loaded

    where, loaded = asyncio.run(run())
    assert loaded == ["policy"] and (where / "policy").is_dir() and not (where / "critic").exists()


@pytest.mark.parametrize("when", ["begin_save", "save_progress"])
def test_a_save_that_fails_leaves_no_checkpoint(tmp_path, when):
    async def run():
        *_, recovery = setting(tmp_path)

        async def refuse(rank, method, directory=""):
            if method == when:
                raise WorkerError("critic/0 died")

        recovery.roles = role_groups_of(policy=CheckpointedRoles().learner("policy"), critic=refuse)
        await saved(recovery)

    with pytest.raises(WorkerError, match="critic/0 died"):
        asyncio.run(run())
    assert CheckpointStore(tmp_path, 2).latest() is None
    assert [path.name for path in tmp_path.iterdir() if "step" in path.name] == []


def test_waiting_experience_that_lay_on_a_lost_node_calls_for_what_its_update_would_call_for(tmp_path, summary):
    """The learners are all there, and nobody else can say that the run has to go back to the last checkpoint."""

    async def run():
        workers, _, buffer, recovery = setting(tmp_path)
        keys = [SampleKey(0, 0, 0), SampleKey(0, 1, 0)]
        chunk = buffer.reserve(2, 0)
        chunk.keys = keys
        chunk.fill("gone", 0, 20, summary(keys))
        buffer.commit(chunk)

        async def gone(rank, method, *args):
            raise WorkerLost("an argument of save of assembler/0 was lost", "assembler", 0, 1, method, "result")

        recovery.roles = role_groups_of(policy=workers.learner("policy"), critic=None, assembler=gone)
        recovery.roles.policy.incarnation = lambda rank: 3
        with pytest.raises(WorkerLost, match="waits for policy is lost: an argument of save") as caught:
            await saved(recovery)
        return recovery.roles.trains(caught.value.role), caught.value.incarnation

    assert asyncio.run(run()) == (True, 3)
    assert CheckpointStore(tmp_path, 2).latest() is None and not list(tmp_path.glob(".tmp*"))


def consume(recovery, row, step):
    key = SampleKey(0, row, 0)
    begin(recovery.ledger, [key], step - 1)
    recovery.ledger.generated([key], "generator/0")
    recovery.ledger.scored([key], step - 1)
    recovery.ledger.consumed([key], step)
    recovery.state.step = step


def committed(recovery):
    with closing(open_for_reading(recovery.ledger.path)) as db:
        return db.execute("SELECT step FROM samples WHERE state = 'committed' ORDER BY step").fetchall()


def test_training_goes_on_while_a_checkpoint_is_written_and_the_ledger_waits_for_its_manifest(tmp_path):
    async def run():
        workers, *_, recovery = setting(tmp_path)
        workers.disk.clear()
        consume(recovery, 0, 1)
        assert await recovery.save() > 0
        consume(recovery, 1, 2)  # the next update is made meanwhile
        while workers.asked <= 2:
            await asyncio.sleep(0.01)
        await recovery.settled(wait=False)
        assert not (tmp_path / "step_1").exists() and committed(recovery) == []
        workers.disk.set()
        await recovery.settled()
        assert committed(recovery) == [(1,)], "what came after is not in it"
        with closing(open_for_reading(tmp_path / "step_1/ledger.sqlite")) as db:
            assert db.execute("SELECT step, state FROM samples").fetchall() == [(1, "committed")]

    asyncio.run(run())
    assert CheckpointStore(tmp_path, 2).latest().step == 1


def test_one_checkpoint_is_under_way_at_a_time(tmp_path):
    async def run():
        workers, *_, recovery = setting(tmp_path)
        workers.disk.clear()
        consume(recovery, 0, 1)
        await recovery.save()
        consume(recovery, 1, 2)
        asyncio.get_running_loop().call_later(0.3, workers.disk.set)
        assert await recovery.save() > 0.25, "it waits for the one before"
        assert (tmp_path / "step_1").is_dir()
        await recovery.settled()

    asyncio.run(run())
    assert CheckpointStore(tmp_path, 2).latest().step == 2


@pytest.mark.parametrize(("patience_s", "whole"), [(None, True), (5.0, True), (0.05, False), (0.0, False)])
def test_a_run_that_ends_lets_its_checkpoint_come_to_an_end_unless_it_is_in_a_hurry(tmp_path, patience_s, whole):
    async def run():
        workers, *_, recovery = setting(tmp_path)
        workers.disk.clear()
        await recovery.save()
        asyncio.get_running_loop().call_later(0.3, workers.disk.set)
        await recovery.close(patience_s)

    asyncio.run(run())
    assert (tmp_path / "step_0").is_dir() is whole
    assert [path.name for path in tmp_path.iterdir() if "tmp-step" in path.name] == []


ONE_STEP = {"algorithm": {"epochs": 1, "mini_batches": 1, "kl": {"placement": "loss"}}}
TOP_K = {"sampling": {"top_k": 50}, "algorithm": {"epochs": 2}}


@pytest.mark.parametrize(("former", "now", "why"), [
    # A run with one optimizer step a batch goes on at max_staleness 0, where the update gives them itself.
    ({**ONE_STEP, "staleness": 1}, ONE_STEP,
     "made with old log-probabilities of the policy, and the run resumed with old log-probabilities of the update"),
    ({"sampling": {"temperature": 0.7}}, {"sampling": {"top_k": 50}},
     "made with tokens sampled at temperature=0.7 among all tokens, and the run resumed with tokens sampled at "
     "temperature=1 among the top_k tokens"),
    ({"sampling": {"min_tokens": 4}}, {},
     "made with tokens sampled at temperature=1 among all tokens, stop tokens later, and the run resumed with tokens "
     "sampled at temperature=1 among all tokens"),
    # Otherwise it would be penalised in its rewards and in the loss.
    (TOP_K, {**TOP_K, "algorithm": {"epochs": 2, "kl": {"placement": "loss"}}},
     "made with the KL penalty in the reward, and the run resumed with the KL penalty in the loss"),
])
def test_experience_of_another_kind_than_updates_need_now_is_made_again(
        tmp_path, summary, ppo_config, former, now, why):
    keys = [SampleKey(0, row, 0) for row in range(6)]

    async def run():
        _, state, buffer, recovery = setting(tmp_path)
        recovery.experience = kind_of(ppo_config, **former)
        places = [buffer.reserve(2, 0) for _ in range(2)]
        begin(recovery.ledger, keys[:4], 0)
        recovery.ledger.generated(keys[2:4], "generator/0")
        recovery.ledger.scored(keys[2:4], 0)
        places[0].keys, places[1].keys, state.returned = keys[:2], keys[2:4], keys[4:]
        places[1].fill("experience of 2 and 3", 0, 20, summary(keys[2:4]))
        buffer.commit(places[1])
        where = await saved(recovery)

        _, again, other, restored = setting(tmp_path)
        restored.experience = kind_of(ppo_config, **now)
        restored.ledger = Ledger.resume(tmp_path / "resumed.sqlite", where / LEDGER, FACTS)
        await restored.restore(where)
        with closing(open_for_reading(restored.ledger.path)) as db:
            ((reason,),) = db.execute("SELECT DISTINCT reason FROM attempts WHERE row IN (2, 3)")
        return again, other, reason

    again, buffer, reason = asyncio.run(run())
    assert again.returned == [*keys[2:4], *keys[4:]] and buffer.ready() == []
    assert {chunk.place.order: chunk.keys for chunk in buffer.under_way()} == {0: keys[:2]}
    assert reason == why


def kind_of(ppo_config, sampling=None, algorithm=None, **settings):
    config = ppo_config(**settings)
    generator = config.generator.model_copy(update={"sampling": SamplingConfig(**(sampling or {}))})
    return experience_kind(config.model_copy(
        update={"generator": generator, "algorithm": AlgorithmConfig(**(algorithm or {"mini_batches": 1}))}))


def test_other_ranks_and_another_estimator_are_refused_by_name(tmp_path):
    async def run():
        *_, recovery = setting(tmp_path, {"policy.workers": 2, "algorithm.estimator": "gae"})
        where = await saved(recovery)
        *_, other = setting(tmp_path, {"policy.workers": 1, "algorithm.estimator": "grpo"})
        await other.restore(where)

    with pytest.raises(ConfigError, match=r"workers was 2 and is 1; algorithm\.estimator was gae and is grpo"):
        asyncio.run(run())
