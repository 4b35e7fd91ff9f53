"""PPO learns: on a task that following the gradient solves, and only that.

The reward is the share of tokens from the lower half of the vocabulary. The control gets the same scores in another
order, and learns nothing. In the overlapped run (max_staleness 1) the bound on staleness is at work too.
"""

import json
import sys

import cloudpickle
import numpy as np
import pytest

from rlhf_ray.checkpoint.manifest import verify_manifest
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.records import Prompts, RewardScores, Rollout
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.stages import ppo
from tests.cluster.conftest import SMALL, VOCAB
from tests.models import make_counting_reward_model
from tests.roles_in_runs import use_class

pytestmark = pytest.mark.cluster
STEPS = 20


def learn(configure, directory, max_staleness, chunk=8):
    """Summary of a run on the task, and the rows of its training steps."""
    reward = make_counting_reward_model(directory.parent / "counting", VOCAB)
    learner = {"workers": 1, "zero_stage": 1, "micro_batch_tokens": 512, "optimizer": {"learning_rate": 0.01}}
    sections = {
        **SMALL, "rewards": {"main": {"type": "model", "path": str(reward)}}, "run": {"steps": STEPS, "seed": 1},
        "policy": learner, "critic": learner,
        "checkpoint": {"every": 0, "best_metric": "reward"}, "evaluation": {"limit": 4, "every": 5},
        "generator": {"workers": 2 if max_staleness else 1, "chunk": chunk, "max_sequences": 2 * chunk},
        "coordinator": {"prompts_per_step": 64, "samples_per_prompt": 1, "max_staleness": max_staleness},
        "algorithm": {"epochs": 2, "mini_batches": 4, "kl": {"coef": 0.0, "kind": "fixed"}},
    }
    summary = ppo.run(load(PPOConfig, configure(directory, **sections), []))
    return summary, [row for row in read_metrics(directory) if "reward/mean" in row]


def assert_reward_rises(steps):
    """The last updates' rewards are above the first's by far more than they vary."""
    rewards = np.array([row["reward/mean"] for row in steps])
    print(rewards)
    assert abs(rewards[0]) < 0.35, "an untrained policy draws from both halves"
    assert rewards[-4:].mean() > rewards[0] + 0.4, rewards
    assert rewards[10:].mean() > rewards[:5].mean() + 0.2, rewards


class PermutedScores(RewardScorer):
    """The reward model's scores, assigned to other samples of the chunk."""

    async def score(self, rollout: Rollout, prompts: Prompts) -> RewardScores:
        scores = (await super().score(rollout, prompts)).scores
        return RewardScores(np.random.default_rng(rollout.seeds[0]).permutation(scores))


@pytest.fixture(scope="module")
def on_policy(configure, tmp_path_factory):
    """(directory, summary, rows of the training steps) of a synchronous run."""
    directory = tmp_path_factory.mktemp("on_policy") / "run"
    return directory, *learn(configure, directory, max_staleness=0)


def test_reward_rises_on_policy(on_policy):
    _, summary, steps = on_policy
    assert_reward_rises(steps)
    assert {row["staleness/max"] for row in steps} == {0}
    assert summary["reward_after"] > summary["reward_before"] + 0.4


def test_the_permuted_control_learns_nothing(on_policy, configure, tmp_path, monkeypatch):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    use_class(monkeypatch, PermutedScores)
    whole_batch = 64  # scores change places within a chunk
    _, control = learn(configure, tmp_path / "control", max_staleness=0, chunk=whole_batch)
    rewards, controls = (np.array([row["reward/mean"] for row in rows]) for rows in (on_policy[2], control))
    print(controls)
    assert rewards[-4:].mean() > controls[-4:].mean() + 0.4


def test_evaluation_finds_the_best_step_and_its_model_is_kept(on_policy):
    directory, summary, _ = on_policy
    rewards = {row["step"]: row["eval/reward"] for row in read_metrics(directory) if "eval/reward" in row}
    best = max(rewards, key=rewards.get)
    assert list(rewards) == list(range(0, STEPS + 1, 5)) and best > 0
    assert (summary["best_step"], summary["best_value"]) == (best, rewards[best])
    assert json.loads((directory / "best.json").read_text())["checkpoint"] == f"checkpoints/step_{best}"
    assert verify_manifest(directory / f"checkpoints/step_{best}").step == best
    assert (directory / "best/model.safetensors").is_file()


@pytest.fixture(scope="module")
def overlapped(configure, tmp_path_factory):
    """(summary, rows of the training steps) of a run whose rollouts may be one version behind."""
    return learn(configure, tmp_path_factory.mktemp("overlapped") / "run", max_staleness=1)


@pytest.mark.slow
def test_reward_rises_with_rollouts_one_version_behind(overlapped):
    assert_reward_rises(overlapped[1])


@pytest.mark.slow
def test_no_token_is_older_than_the_bound_and_some_are_as_old(overlapped):
    staleness = [row["staleness/max"] for row in overlapped[1]]
    assert max(staleness) == 1, "two batches in flight: work that does not overlap would be all zeros"
    assert min(staleness) >= 0


@pytest.mark.slow
def test_versions_rise_by_one_a_step(overlapped):
    assert [row["step"] for row in overlapped[1]] == list(range(1, STEPS + 1))
    assert [row["weights/version"] for row in overlapped[1]] == [row["step"] for row in overlapped[1]]


@pytest.mark.slow
def test_every_sample_of_an_overlapped_run_was_made_once_and_trained(overlapped):
    ledger = overlapped[0]["ledger"]
    assert (ledger["attempts given up"], ledger["committed"]) == (0, 64 * STEPS)
