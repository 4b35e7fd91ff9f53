"""PPO learns: on a task that anything which follows the gradient solves, and nothing else does.

The reward is the share of tokens from the lower half of the vocabulary. Rollouts and updates overlap (max_staleness 1),
so the same run shows the bound on staleness at work.
"""

import numpy as np
import pytest

from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from tests.cluster.conftest import SMALL, VOCAB
from tests.models import make_counting_reward_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
STEPS = 20


def learn(configure, directory, max_staleness):
    """Summary of a run on the task, and the rows of its training steps."""
    from rlhf_ray.stages import ppo

    reward = make_counting_reward_model(directory.parent / "counting", VOCAB)
    learner = {"workers": 1, "micro_batch_tokens": 512, "optimizer": {"learning_rate": 0.01}}
    sections = {
        **SMALL, "rewards": {"main": {"type": "model", "path": str(reward)}}, "run": {"steps": STEPS, "seed": 1},
        "policy": learner, "critic": learner, "checkpoint": {"every": 0},
        "generator": {"workers": 2 if max_staleness else 1, "chunk": 8, "max_sequences": 16},
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


@pytest.fixture(scope="module")
def run(configure, tmp_path_factory):
    return learn(configure, tmp_path_factory.mktemp("overlapped") / "run", max_staleness=1)


@pytest.fixture
def overlapped(run):
    return run[1]


def test_reward_rises_with_rollouts_one_version_behind(overlapped):
    assert_reward_rises(overlapped)


def test_no_token_is_older_than_the_bound_and_some_are_as_old(overlapped):
    staleness = [row["staleness/max"] for row in overlapped]
    assert max(staleness) == 1, "two batches in flight: work that does not overlap would be all zeros"
    assert min(staleness) >= 0


def test_versions_rise_by_one_a_step(overlapped):
    assert [row["step"] for row in overlapped] == list(range(1, STEPS + 1))
    assert [row["weights/version"] for row in overlapped] == [row["step"] for row in overlapped]


def test_every_sample_of_an_overlapped_run_was_made_once_and_trained(run):
    ledger = run[0]["ledger"]
    assert (ledger["attempts given up"], ledger["committed"]) == (0, 64 * STEPS)


def test_reward_rises_on_policy(configure, tmp_path):
    _, steps = learn(configure, tmp_path / "run", max_staleness=0)
    assert_reward_rises(steps)
    assert {row["staleness/max"] for row in steps} == {0}
