"""The quickstart teaches what it says, for three seeds, and stops teaching it when the scores say nothing."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from ray import cloudpickle

from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.records import Prompts, RewardScores, Rollout
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.stages import ppo, quickstart
from tests.roles_in_runs import use_class
from tests.slow.conftest import SEEDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", SEEDS)
def test_the_judge_who_was_never_trained_on_agrees_that_it_improved(seed, finished_quickstart):
    directory, summary = finished_quickstart(seed)
    assert summary["reward_model_accuracy"] >= 0.85
    assert summary["gold_before"] < 0.3
    assert summary["gold_after"] >= 0.9
    assert summary["kl"] <= 8
    assert summary["distinct"] >= 0.95
    evaluation = json.loads((directory / "evaluation.json").read_text())
    assert evaluation["after"]["responses"] >= 512


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mixtral"])
def test_models_of_other_families_improve_as_much(family, finished_quickstart):
    _, summary = finished_quickstart(0, family)
    assert summary["reward_model_accuracy"] >= 0.85
    assert summary["gold_before"] < 0.3 and summary["gold_after"] >= 0.9
    assert summary["kl"] <= 10 and summary["distinct"] >= 0.95


HALF = ["--model.dtype=bfloat16", "--rewards.preference.dtype=bfloat16", "--policy.autocast=bfloat16",
        "--critic.autocast=bfloat16", "--algorithm.old_logprobs=policy"]
"""Generators, frozen models and passes of the learners in bfloat16. Generators and learner round differently, so the
policy's own pass gives the old log-probabilities, and tokens get importance weights."""
GAP = ("rollout/logprob_gap", "rollout/logprob_gap_p99")


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_bf16"), reason="no instructions for bfloat16")
@pytest.mark.parametrize("seed", SEEDS)
def test_bfloat16_teaches_as_much_as_float32(seed, finished_quickstart, tmp_path):
    directory, single = finished_quickstart(seed)
    half = ppo.run(quickstart.RECIPE.config("ppo", directory, seed, [f"--run.dir={tmp_path / 'half'}", *HALF]))
    gaps = [_column(tmp_path / "half", name) for name in GAP]
    for name, run, summary in (("float32", directory, single), ("bfloat16", tmp_path / "half", half)):
        rate = np.median(_column(run, "throughput/tokens_per_second"))
        print(f"seed {seed}, {name}: gold {summary['gold_after']:.3f}, KL {summary['kl']:.2f}, {rate:,.0f} tokens/s")
    print("gap:", *(f"{np.mean(gap):.4f}" for gap in gaps))
    assert half["gold_before"] < 0.3 and half["gold_after"] >= 0.9
    assert half["kl"] <= 8 and half["distinct"] >= 0.95
    assert 1e-4 < np.mean(gaps[0]) < 0.05  # float32's is a millionth


def _column(run, name):
    """A metric of the run's steps; rows of evaluations lack it."""
    return [row[name] for row in read_metrics(run) if name in row]


class PermutedScores(RewardScorer):
    """The reward model's scores, dealt out to the wrong samples of the batch."""

    async def score(self, rollout: Rollout, prompts: Prompts) -> RewardScores:
        rewards = await super().score(rollout, prompts)
        return replace(rewards, scores=np.random.default_rng(rollout.seeds[0]).permutation(rewards.scores))


@pytest.mark.parametrize("seed", SEEDS)
def test_permuted_scores_teach_nothing(seed, finished_quickstart, tmp_path, monkeypatch):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    use_class(monkeypatch, PermutedScores)
    directory, _ = finished_quickstart(seed)
    whole_batch_in_one_chunk = ["--generator.chunk=128", "--generator.max_sequences=128"]
    config = quickstart.RECIPE.config("ppo", directory, seed, [
        f"--run.dir={tmp_path / 'control'}", "--run.steps=20", "--critic.init=policy", *whole_batch_in_one_chunk])
    assert ppo.run(config)["gold_after"] < 0.3
