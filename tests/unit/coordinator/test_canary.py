"""When generators are compared with the learner, and what follows from it: stand-ins whose log-probabilities differ by
given amounts."""

import asyncio
from contextlib import closing

import numpy as np
import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.coordinator.canary import Canary
from rlhf_ray.errors import GeneratorMismatch, ModelError
from rlhf_ray.records import GivenTokens, LearnerPass, Rollout
from rlhf_ray.replay.audit import audit
from rlhf_ray.replay.ledger import open_for_reading
from tests.unit.coordinator.harnesses import CoordinatorHarness
from tests.unit.coordinator.losses import PublishingHarness
from tests.unit.coordinator.stand_ins import StandInGroup, role_groups_of

ROWS = GivenTokens(np.array([0, 4]), np.arange(4, dtype=np.int32), np.array([False, True, True, True]))
EXACT = np.array([-1.0, -2.0, -3.0], np.float32)
NOISE = 1e-6


class Compared:
    """A learner of two ranks and three generators; `apart` has each generator's difference, by rank."""

    def __init__(self, precision="float32", noise=NOISE, long_row=None):
        self.apart, self.noise, self.version, self.update, self.precision = {}, noise, 0, 0.0, precision
        self.generators = StandInGroup("generator", self._generator, workers=3)
        self.roles = role_groups_of(generators=self.generators, policy=StandInGroup("policy", self._policy, workers=2))
        self.canary = Canary(self.roles, ROWS, "models/m", long_row, seed=5)

    async def _policy(self, rank, method, rows):
        values = EXACT + np.float32(self.update)
        return None if rank else LearnerPass(values, values + np.float32(self.noise), self.precision)

    async def _generator(self, rank, method, *args):
        values = EXACT + np.float32(self.update + self.apart.get(rank, 0.0))
        if method == "generate":
            prompts, keys, *_ = args
            tokens = np.concatenate([prompts.tokens, [1, 2, 3]]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompts.tokens)
            return Rollout(np.array([0, len(tokens)]), tokens, mask, np.where(mask, EXACT[0] + self.far, 0.0),
                           np.where(mask, 0, -1), keys, np.zeros(1, np.int64), ["length"])
        return values, self.version

    def asked(self):
        """Ranks of the generators that computed log-probabilities, in order."""
        return [rank for method, rank in self.generators.log if method == "given_logprobs"]

    async def compare(self, version, ranks=None):
        self.canary.begin(version, ranks)
        return await self.canary.mismatch()


def test_each_publication_is_compared_with_the_next_generator_and_all_if_asked():
    it = Compared()

    async def run():
        await it.canary.compare_at_start()
        for it.version in (1, 2, 3, 4):
            assert await it.compare(it.version) is None
        assert await it.canary.mismatch() is None, "said once"
        await it.compare(4, [0, 1, 2])

    asyncio.run(run())
    assert it.asked() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2]


@pytest.mark.parametrize(("precision", "apart", "refused"), [
    ("float32", 5e-5, False), ("float32", 2e-4, True), ("bfloat16", 0.03, False), ("bfloat16", 0.1, True)])
def test_a_start_is_refused_above_the_tolerance_of_the_precision(precision, apart, refused):
    it = Compared(precision)
    it.apart = {2: apart}
    if not refused:
        assert asyncio.run(it.canary.compare_at_start()) == pytest.approx(apart, rel=0.01)
        return
    with pytest.raises(ModelError, match=r"generator/2 and the policy learner compute different .*'models/m'.*config"):
        asyncio.run(it.canary.compare_at_start())


def test_tokens_after_a_long_prompt_are_compared_too():
    it = Compared(long_row=GivenTokens(np.array([0, 50]), np.arange(50, dtype=np.int32), np.ones(50, bool)))
    it.far = 0.5
    with pytest.raises(ModelError, match="generator/0"):
        asyncio.run(it.canary.compare_at_start())


def test_a_gap_that_the_start_would_tolerate_is_found_after_a_publication():
    it = Compared()

    async def run():
        it.apart = {0: 2e-6}
        await it.canary.compare_at_start()
        it.version, it.apart, it.update = 1, {0: 5e-6}, 0.5
        assert await it.compare(1) is None
        it.version, it.apart, it.update = 2, {1: 5e-5}, 0.75
        return await it.compare(2)

    error = asyncio.run(run())
    assert "generator/1 confirmed version 2 of the weights and does not compute with it" in str(error)
    assert "by 5.01e-05 nats" in str(error) and "the last update moved them by 0.25" in str(error)
    found = it.canary.metrics()
    assert found["weights/canary_moved"] == pytest.approx(0.25)
    assert found["weights/canary_gap"] > found["weights/canary_bound"] > 5e-6


def test_as_much_as_rounding_grows_the_gap_may():
    it = Compared()

    async def run():
        it.apart = dict.fromkeys(range(3), 2e-06)
        await it.canary.compare_at_start()
        it.version, it.noise, it.apart = 1, 100 * NOISE, dict.fromkeys(range(3), 0.0004)
        return await it.compare(1)

    assert asyncio.run(run()) is None


def test_an_answer_of_another_version_or_without_numbers_is_a_mismatch():
    it = Compared()

    async def run():
        await it.canary.compare_at_start()
        other = await it.compare(1)
        it.apart, it.version = {1: np.nan}, 1
        return str(other), str(await it.compare(1))

    other, none = asyncio.run(run())
    assert "generator/0 computes with version 0 of the weights, and it confirmed version 1" in other
    assert "generator/1" in none and "inf nats" in none


class WithCanary(PublishingHarness):
    """Generators that are replaced; `wrong` has (rank, incarnation) of those whose log-probabilities are wrong."""

    def __init__(self, wrong=(), **options):
        super().__init__(**options)
        self.wrong, behave, learner = set(wrong), self.group.behave, self.learner
        self.sync.canary = Canary(self.roles, ROWS, "m")

        async def generator(rank, method, *args):
            if method == "given_logprobs":
                await behave(rank, method)  # which may be lost
                wrong = (rank, self.group.incarnation(rank)) in self.wrong
                return EXACT + np.float32(wrong), self.group.versions[rank]
            return await behave(rank, method, *args)

        async def policy(rank, method, *args):
            return LearnerPass(EXACT, EXACT, "float32") if method == "given_logprobs" else await learner(
                rank, method, *args)

        self.group.answer, self.policy.answer = generator, policy


def test_a_generator_that_is_lost_in_a_comparison_is_compared_when_it_has_caught_up():
    it = WithCanary(doomed=[(0, "given_logprobs")], wrong=[(0, 2)])

    async def run():
        await it.publish(1)
        assert await it.sync.canary.mismatch() is None
        await asyncio.sleep(20)
        later = set(it.health.missing)
        await asyncio.sleep(200)
        return later

    assert run_in_virtual_time(run()) == {("generator", 0)}, "it is wrong, and gets no work"
    assert any("generator/0 confirmed version 1 of the weights and does not compute" in said for said in it.said)
    assert it.group.incarnations[0] == 3 and it.health.missing == set(), "the next one is right"


class WithMismatches(CoordinatorHarness):
    """A run whose comparisons after versions `wrong` find a mismatch, once for each time that a version is named."""

    def __init__(self, config, summary, wrong, **options):
        super().__init__(config, summary, **options)
        self.wrong, self._under_way = list(wrong), None
        self.coordinator.weights.canary = self
        self.coordinator.weights.publish = self.publish

    async def publish(self, version, resend=False):
        published = await super().publish(version)
        self.events[-1] += " again" if resend else ""
        self._under_way = version
        return published

    async def mismatch(self):
        await asyncio.sleep(0.02)  # meanwhile samples are made
        if self._under_way is not None:
            await self.meanwhile()
        version, self._under_way = self._under_way, None
        if version is None:
            return None
        self.events.append(f"compared {version}")
        if version not in self.wrong:
            return None
        self.wrong.remove(version)
        return GeneratorMismatch(f"generator/0 does not compute with version {version}")

    async def meanwhile(self):
        """Of a test."""

    def metrics(self):
        return {"weights/canary_gap": 0.5}


def test_nothing_is_trained_evaluated_or_saved_before_the_comparison(ppo_config, summary):
    run = WithMismatches(ppo_config(prompts=4, steps=3, checkpoint={"every": 2}), summary, wrong=[])
    assert run.go()[1:] == ["policy 0", "critic 0", "publish 1", "compared 1", "policy 1", "critic 1", "publish 2",
                        "compared 2", "save 2", "policy 2", "critic 2", "publish 3", "compared 3", "save 3"]
    assert run.rows[3]["weights/canary_gap"] == 0.5


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_mismatch_that_a_whole_publication_repairs_costs_the_samples_since(ppo_config, summary, staleness):
    run = WithMismatches(ppo_config(prompts=4, steps=5, staleness=staleness), summary, wrong=[2, 3])
    events = run.go()
    assert [event for event in events if "2" in event and "critic" not in event] == [
        "publish 2", "compared 2", "publish 2 again", "compared 2", "policy 2"]
    assert events[-1] == "save 5" and run.harness.state.samples == 5 * 4
    assert len(run.warnings) == 2 and "published again" in run.warnings[0]
    ledger = run.harness.ledger
    ledger.close()
    with closing(open_for_reading(ledger.path)) as db:
        assert audit(db, ended=False) == []
        reasons = [reason for (reason,) in db.execute("SELECT DISTINCT reason FROM attempts")]
        trained = db.execute("SELECT count(*) FROM samples WHERE step IS NOT NULL").fetchone()[0]
    assert trained == 5 * 4 and any("does not compute with version 2" in reason for reason in reasons)


def test_a_mismatch_that_stays_ends_the_run_saved(ppo_config, summary):
    run = WithMismatches(ppo_config(prompts=4, steps=5, staleness=1), summary, wrong=[2, 2])
    with pytest.raises(GeneratorMismatch, match=r"version 2, also after all weights were published again\. Resume"):
        run.go()
    assert run.events[-2:] == ["compared 2", "save 2"] and run.left == []


def test_what_was_ready_before_the_publication_is_kept(ppo_config, summary):
    run = WithMismatches(ppo_config(prompts=4, steps=4, staleness=2), summary, wrong=[1])
    buffer, learning, pipeline = run.harness.buffer, run.coordinator._learning, run.coordinator.pipeline
    learn, give_up, kept, dropped = learning.learn, pipeline.give_up_since, set(), set()

    def ready():
        return {chunk.place for chunk in buffer.ready()}

    async def learn_until_some_are_ready(lease):
        learned = await learn(lease)
        while run.harness.state.step == 1 and not ready():
            await asyncio.sleep(0.001)
        return learned

    async def sample_until_others_are_ready():
        while not kept and ready() <= run.coordinator._kept:
            await asyncio.sleep(0.001)

    async def give_up_and_look(orders, reason):
        kept.update(orders)
        dropped.update(ready() - kept)
        await give_up(orders, reason)
        assert ready() == kept

    learning.learn, pipeline.give_up_since = learn_until_some_are_ready, give_up_and_look
    run.meanwhile = sample_until_others_are_ready
    run.go()
    assert kept and dropped


def test_a_generator_that_waits_for_the_learners_answer_when_learners_are_replaced_gets_the_new_ones():
    it, slow = WithCanary(workers=1), asyncio.Event()
    answer = it.policy.answer

    async def late(rank, method, *args):
        if method == "given_logprobs":
            await slow.wait()
        return await answer(rank, method, *args)

    async def run():
        await it.publish(1)
        assert await it.sync.canary.mismatch() is None
        it.policy.answer = late
        slow.clear()
        async with it.sync.changing():
            await it.sync.publish(2)
        it.group.doomed.append((0, "generate"))
        asked = asyncio.create_task(it.ask_all(1))
        await asyncio.sleep(8.0)  # it has caught up, and waits for the answer
        await it.sync.forget()
        slow.set()
        async with it.sync.changing():
            await it.sync.publish(1, resend=True)
        return await asked

    slow.set()
    assert run_in_virtual_time(run()) == [0] and it.group.versions == [1] and it.health.down == {}
