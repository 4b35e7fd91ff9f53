"""Held-out measurements summed up by hand."""

import asyncio
import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.derived import derive, evaluation_metrics
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.evaluation import TEXTS, Evaluator
from rlhf_ray.errors import RewardError, UnscoredSamples, WorkerLost
from rlhf_ray.records import EvaluationPart, SampleKey, Unscored
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.evaluation_metrics import pass_rates, summarise
from tests.unit.coordinator.stand_ins import StandInPrompts, calls_of, role_groups_of


def part(scores, lengths, finished, digests, bigrams, kl, reference, gold=None, texts=()):
    return EvaluationPart(
        rows=np.arange(len(scores)), scores=np.array(scores, dtype=np.float32),
        gold=None if gold is None else np.array(gold, dtype=np.float32),
        kl=np.array(kl, dtype=np.float32), reference_logprobs=np.array(reference, dtype=np.float32),
        lengths=np.array(lengths), finished=np.array(finished), digests=np.array(digests), bigrams=np.array(bigrams),
        texts=list(texts),
    )


FIRST = part([1.0, 2.0], [3, 1], [True, False], [7, 8], [11, 12], [0.5, 1.0], [-3.0, -1.0])
SECOND = part([6.0], [4], [True], [7], [11, 13, 11], [3.0], [-8.0])


def test_every_number_by_hand():
    assert summarise([FIRST, SECOND]) == pytest.approx({
        "reward": 3.0, "kl": 1.5, "length": 8 / 3, "finished": 2 / 3, "responses": 3.0,
        "perplexity": math.exp(12 / 8),  # 12 nats over 8 tokens
        "distinct": 2 / 3,  # texts 7, 8, 7
        "distinct_bigrams": 3 / 5,  # pairs 11, 12, 11, 13, 11
    })


def test_repeats_count_across_parts():
    assert summarise([FIRST])["distinct"] == 1.0 and summarise([SECOND])["distinct"] == 1.0


def test_one_token_responses_have_no_bigrams():
    only = part([1.0], [1], [True], [7], [], [0.0], [-1.0])
    assert summarise([only])["distinct_bigrams"] == 0.0


def test_the_judges_mean_is_told_when_there_is_one():
    judged = part([1.0, 2.0], [1, 1], [True, True], [7, 8], [], [0, 0], [-1, -1], gold=[0.5, -1.0])
    assert summarise([judged])["gold"] == -0.25


def test_components_of_the_reward_are_told_one_by_one():
    parts = [replace(FIRST, components={"a": np.array([1.0, 2.0]), "b": np.array([0.0, 0.0])}),
             replace(SECOND, components={"a": np.array([6.0]), "b": np.array([-3.0])})]
    found = summarise(parts)
    assert (found["reward"], found["reward/a"], found["reward/b"]) == (3.0, 3.0, -1.0)


def test_the_names_that_a_best_metric_may_have_are_those_that_are_measured():
    config = PPOConfig(
        model={"path": "m"}, prompts={"path": "p"}, evaluation={"prompts": "e", "samples_per_prompt": 2},
        rewards={"a": {"type": "exact_match"}, "b": {"type": "model", "path": "r"}}, logging={"judge": "vader"})
    scores = np.array([1.0, 0.0])
    measured = part(scores, [1, 1], [True, True], [7, 8], [], [0, 0], [-1, -1], gold=[0.5, -1.0])
    parts = [replace(measured, rows=np.array([4, 4]), components={"a": scores, "b": scores})]
    assert evaluation_metrics(config) == {*summarise(parts), *pass_rates(parts, derive(config).solved_at)}


class EvaluationHarness:
    """An evaluator over stand-ins of the roles; `asked` has what the generators were asked for. No sample of `bad` has
    a score."""

    def __init__(self, config, rows, bad=(), warn=lambda _: None):
        self.asked, self.scored, self._bad = [], [], bad
        self.roles = roles = role_groups_of(generators=self.generate, reward=self.score, assembler=self.measure)
        prompts = StandInPrompts("held out", rows=rows)
        self.evaluator = Evaluator(config, derive(config), roles, calls_of(config, roles), prompts, warn)

    async def generate(self, rank, method, prompts, keys, seed, sampling):
        self.asked.append((keys, seed, prompts[0], sampling))
        await asyncio.sleep(0.01 / len(self.asked))
        return keys

    async def score(self, rank, method, rollouts, prompts):
        (keys,) = rollouts
        self.scored.append(keys)
        if failed := [Unscored(key, "p", "r", f"row {key.row} is odd") for key in keys if key in self._bad]:
            raise UnscoredSamples("no score", failed)

    async def measure(self, rank, method, *arguments):
        if method == "sum_up":
            return Assembler.sum_up(None, *arguments)
        assert method == "measure"
        keep_texts, keys, *_ = arguments
        texts = [{"prompt": str(k.row), "response": ""} for k in keys][:keep_texts]
        n = len(keys)
        return part([k.row for k in keys], [1] * n, [True] * n, range(n), [], [0] * n, [0] * n, texts=texts)


def test_every_held_out_prompt_is_asked_once_with_the_same_seed(ppo_config):
    async def run():
        harness = EvaluationHarness(ppo_config(chunk=4, evaluation={"prompts": "e", "seed": 99}), rows=10)
        return await harness.evaluator.measure(), await harness.evaluator.measure(), harness.asked

    one, two, asked = asyncio.run(run())
    chunks = [[SampleKey(0, row, 0) for row in rows] for rows in (range(4), range(4, 8), range(8, 10))]
    assert asked == [(keys, 99, "held out", None) for keys in chunks * 2]
    assert one == two and one.metrics["reward"] == 4.5
    assert [text["prompt"] for text in one.texts] == [str(i) for i in range(min(TEXTS, 4))]


def test_chunks_are_kept_on_request_and_every_sample_that_was_measured_is_counted(ppo_config):
    config = ppo_config(chunk=4, evaluation={"prompts": "e"})

    async def run(**more):
        harness = EvaluationHarness(config, rows=10)
        harness.evaluator = Evaluator(config, derive(config), harness.roles, calls_of(config, harness.roles),
                                      StandInPrompts("held out", rows=10), **more)
        return await harness.evaluator.measure()

    counted = []
    kept = asyncio.run(run(keeps_chunks=True, advanced=counted.append))
    assert [[key.row for key in each.chunk.keys] for each in kept.chunks] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sorted(counted) == [2, 4, 4]
    assert asyncio.run(run()).chunks == ()


def test_measured_chunks_that_are_lost_with_a_node_are_measured_again(ppo_config):
    class LosesParts(EvaluationHarness):
        losses = 1

        async def measure(self, rank, method, *arguments):
            if method == "sum_up" and self.losses:
                self.losses -= 1
                raise WorkerLost("the result of measure is lost", "assembler", 0, 1, "sum_up", "result")
            return await super().measure(rank, method, *arguments)

    async def run(losses):
        harness = LosesParts(ppo_config(chunk=4, evaluation={"prompts": "e"}, cluster={"max_restarts": 2}), rows=10)
        harness.losses = losses
        return await harness.evaluator.measure(), len(harness.asked)

    once, asked = asyncio.run(run(0))
    assert asyncio.run(run(2)) == (once, 3 * asked)
    with pytest.raises(WorkerLost):
        asyncio.run(run(3))


def test_when_one_chunk_fails_the_others_are_not_scored(ppo_config):
    class OneFails(EvaluationHarness):
        async def generate(self, rank, method, prompts, keys, seed, sampling):
            await asyncio.sleep(0.01 if keys[0].row == 4 else 0.05)
            if keys[0].row == 4:
                raise RewardError("no score")
            return keys

    async def run():
        harness = OneFails(ppo_config(chunk=4, evaluation={"prompts": "e"}), rows=10)
        with pytest.raises(RewardError):
            await harness.evaluator.measure()
        await asyncio.sleep(0.1)
        return harness.scored

    assert asyncio.run(run()) == []


@pytest.mark.parametrize("cancelled", [True, False])
def test_when_an_evaluation_is_over_early_generators_have_none_of_its_requests(ppo_config, cancelled):
    class Long(EvaluationHarness):
        open = 0

        async def generate(self, rank, method, prompts, keys, seed, sampling):
            if keys[0].row == 4 and not cancelled:
                await asyncio.sleep(0.02)
                raise RewardError("no score")
            self.open += 1
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.02)  # until the engine has aborted it
                self.open -= 1

    async def run():
        harness = Long(ppo_config(chunk=4, evaluation={"prompts": "e"}), rows=10)
        measuring = asyncio.create_task(harness.evaluator.measure())
        await asyncio.sleep(0.01)
        began = harness.open
        if cancelled:
            measuring.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else RewardError):
            await measuring
        return began, harness.open

    assert asyncio.run(run()) == ((3, 0) if cancelled else (2, 0))


@pytest.mark.parametrize("cancelled", [True, False])
def test_an_evaluation_that_is_over_early_waits_for_a_worker_that_hangs_as_long_as_the_end_of_a_run(
        ppo_config, cancelled):
    class Hangs(EvaluationHarness):
        async def generate(self, rank, method, prompts, keys, seed, sampling):
            if keys[0].row == 4 and not cancelled:
                await asyncio.sleep(10)
                raise RewardError("no score")
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(300)  # cluster.heartbeat_timeout_s

    async def run():
        began = asyncio.get_running_loop().time()
        harness = Hangs(ppo_config(chunk=4, evaluation={"prompts": "e"}), rows=10)
        measuring = asyncio.create_task(harness.evaluator.measure())
        await asyncio.sleep(10)
        if cancelled:
            measuring.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else RewardError):
            await measuring
        return asyncio.get_running_loop().time() - began

    assert run_in_virtual_time(run()) == pytest.approx(12.0, abs=0.1)


@pytest.mark.parametrize(("sampling", "told"), [
    (None, True), ({"temperature": 0.7}, True), ({"temperature": 0.7, "max_tokens": 9}, True),
    ({"temperature": 1.0}, False), ({"temperature": 0.0}, False), ({"temperature": 0.7, "top_p": 0.9}, False),
    ({"temperature": 0.7, "top_k": 5}, False),
])
def test_the_distribution_under_training_is_known_from_its_settings(ppo_config, sampling, told):
    config = ppo_config(evaluation={"prompts": "e", "sampling": sampling})
    trained = config.generator.model_copy(update={"sampling": SamplingConfig(temperature=0.7)})
    config = config.model_copy(update={"generator": trained})
    assert derive(config).evaluates_the_policy_itself is told

    async def run():
        harness = EvaluationHarness(config, rows=2)
        return (await harness.evaluator.measure()).metrics, harness.asked

    metrics, asked = asyncio.run(run())
    assert ("kl" in metrics) is told
    assert asked[0][3] == (SamplingConfig(**sampling) if sampling else None)


def test_several_samples_of_a_prompt_have_seeds_of_their_own_and_texts_of_different_prompts(ppo_config):
    async def run():
        config = ppo_config(chunk=4, evaluation={"prompts": "e", "samples_per_prompt": 2})
        harness = EvaluationHarness(config, rows=5)
        return await harness.evaluator.measure(), harness.asked

    found, asked = asyncio.run(run())
    keys = [key for chunk, *_ in asked for key in chunk]
    assert keys == [SampleKey(0, row, sample) for sample in range(2) for row in range(5)]
    assert found.metrics["responses"] == 10
    assert len({text["prompt"] for text in found.texts}) == len(found.texts)


def judged(rows, **components):
    base = part([0.0] * len(rows), [1] * len(rows), [True] * len(rows), range(len(rows)), [], [0] * len(rows),
                [-1] * len(rows))
    arrays = {name: np.array(values, dtype=np.float32) for name, values in components.items()}
    return dataclasses.replace(base, rows=np.array(rows), components=arrays)


def test_pass_rates_by_hand_with_a_prompts_samples_in_different_parts():
    # Prompt 3: samples 1, 0, 0, 0 solve; prompt 8: 0, 0, 0.69, 0.7 where 0.7 is the threshold.
    parts = [judged([3, 8, 3, 8], rule=[1, 0, 0, 0], other=[9, 9, 9, 9]),
             judged([3, 8, 3, 8], rule=[0, 0.69, 0, 0.7], other=[9, 9, 9, 9])]
    assert pass_rates(parts, {"rule": 0.7}) == pytest.approx(
        {"pass@1/rule": (1 / 4 + 1 / 4) / 2, "pass@2/rule": (1 / 2 + 1 / 2) / 2, "pass@4/rule": 1.0})
    assert pass_rates(parts, {}) == {}


def test_which_components_count_as_solved_and_from_where():
    rewards = {
        "sum": {"type": "number", "right": 2.0}, "shape": {"type": "regex", "pattern": "x", "right": -1.0},
        "model": {"type": "model", "path": "r"}, "tests": {"type": "function", "function": "a:b"},
    }

    def solved_at(**evaluation):
        return derive(PPOConfig(model={"path": "m"}, rewards=rewards, prompts={"path": "p"},
                                evaluation={"prompts": "e", **evaluation})).solved_at

    assert solved_at() == {"sum": 2.0}, "a rule whose passing is worth less than its failing solves nothing"
    assert solved_at(solved_at=0.5) == {"sum": 2.0, "tests": 0.5}


def test_an_environment_has_its_own_measure_of_solved():
    def solved_at(**reward):
        environment = {"path": "m:f", "max_tokens": 900}
        given = {"rewards": {"world": {"type": "environment", **reward}}} if reward else {}
        return derive(PPOConfig(model={"path": "m"}, prompts={"path": "p"}, environments={"tools": environment},
                                **given)).solved_at

    assert solved_at() == {"environment": 1.0}, "the component that is added"
    assert solved_at(solved_at=3.0) == {"world": 3.0}


def evaluate_without(ppo_config, bad, warn, rows=5):
    config = ppo_config(chunk=4, evaluation={"prompts": "e", "samples_per_prompt": 2},
                        reward={"on_failure": "quarantine"})
    return asyncio.run(EvaluationHarness(config, rows, bad, warn).evaluator.measure())


def test_a_held_out_prompt_without_a_score_is_left_out_with_all_its_samples_and_told(ppo_config):
    told = []
    bad = [SampleKey(0, 2, 1), SampleKey(0, 4, 0)]  # other samples of both are in chunks that could be scored
    found = evaluate_without(ppo_config, bad, told.append)
    assert found.metrics["unscored"] == 2 and found.metrics["responses"] == 6
    assert found.metrics["reward"] == pytest.approx((0 + 1 + 3) / 3)
    assert [line.split(":")[0].split(" is ")[0] for line in told] == [
        "the held-out prompt of row 2", "the held-out prompt of row 4"]
    assert told[0].endswith("row 2 is odd")
    assert evaluate_without(ppo_config, [], told.append).metrics["unscored"] == 0 and len(told) == 2


def test_an_evaluation_without_any_score_ends_the_run(ppo_config):
    with pytest.raises(RewardError, match="none of the 2 held-out prompts has a score.*row 0 is odd"):
        evaluate_without(ppo_config, [SampleKey(0, 0, 0), SampleKey(0, 1, 0)], lambda _: None, rows=2)
