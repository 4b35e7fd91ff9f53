"""Masked episodes are in no loss, baseline, KL or mean: numbers worked out by hand."""

import math

import numpy as np
import pytest

from rlhf_ray.algorithms.kl import AdaptiveKL
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.coordinator.step_metrics import deviation, mean, mean_kl
from rlhf_ray.errors import UnscoredSamples
from rlhf_ray.records import Episode, RewardScores, RewardTerms, Rollout, SampleKey, TokenScores, offsets_of
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.ppo_update import counted_rows, training_batch
from rlhf_ray.roles.reward_scorer import of_episodes, require_outcomes
from tests.unit.roles.conftest import assemble_one

USES = ["train", "mask", "train", "zero"]
NAN = math.nan
KEYS = [SampleKey(0, 3, i) for i in range(4)]
# One prompt, four episodes; the second, which is masked, has two segments. Each row: one token read, two sampled.
SAMPLES = [0, 1, 1, 2, 3]
MASK = np.array([0, 1, 1] * 5, bool)


def column(values):
    return np.array(values, np.float32)


@pytest.fixture
def rollout():
    episodes = [Episode("world", "completed" if use == "train" else "error_timeout", use, [], [], []) for use in USES]
    return Rollout(
        offsets=offsets_of([3] * 5), tokens=np.arange(2, 17, dtype=np.int32), response_mask=MASK,
        logprobs=np.where(MASK, column([-1.0] * 15), 0), versions=np.where(MASK, 4, -1).astype(np.int32),
        samples=np.array(SAMPLES), keys=KEYS, seeds=np.arange(5), finish_reasons=["stop"] * 5, episodes=episodes)


def scores_of(rollout, scores=(3.0, 1.0)):
    """The scores of the two episodes that are trained on, then of all."""
    return of_episodes(RewardScores(column(scores), {"world": column(scores)}), [0, 2], rollout)


def assembled(rollout, policy_model, rewards, reference, **algorithm):
    assembler = Assembler(AlgorithmConfig(**algorithm), policy_model, 8)
    assembler.start()
    old = TokenScores(offsets=rollout.offsets, values=rollout.logprobs)
    found = TokenScores(offsets=rollout.offsets, values=column(reference))
    return assemble_one(assembler, RewardTerms(0.0), 1, rollout, rewards, found, old)


def test_a_masked_episode_has_no_score_and_one_of_zero_reward_has_zero(rollout):
    found = scores_of(rollout)
    np.testing.assert_equal(found.scores, column([3.0, NAN, 1.0, 0.0]))
    np.testing.assert_equal(found.components["world"], column([3.0, NAN, 1.0, 0.0]))


def test_token_rewards_stay_on_the_tokens_of_their_episode(rollout):
    rewards = RewardScores(column([3.0, 1.0]), {}, token_rewards=column([0, 1, 2, 0, 0, 1]))
    found = of_episodes(rewards, [0, 2], rollout)
    assert found.token_rewards.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_it_is_in_no_baseline_kl_mean_or_loss(rollout, policy_model):
    # The masked episode's KL would be 20; that of the others is 0, 1 (on one token) and 0.
    reference = [-1.0] * 15
    reference[4] = reference[5] = reference[7] = reference[8] = -6.0
    reference[10] = -2.0
    reference = np.where(MASK, reference, 0)
    experience, summary = assembled(rollout, policy_model, scores_of(rollout), reference, estimator="dr_grpo")
    mean_score = (3.0 + 1.0 + 0.0) / 3
    assert experience.advantages[MASK] == pytest.approx(
        [3 - mean_score] * 2 + [0] * 4 + [1 - mean_score] * 2 + [-mean_score] * 2)
    assert experience.counted.tolist() == [True, False, False, True, True]
    np.testing.assert_equal(summary.kl, column([0.0, NAN, 1.0, 0.0]))
    assert mean_kl([summary]) == pytest.approx(1 / 3) and mean(summary.scores) == pytest.approx(4 / 3)

    whole = training_batch([experience], whiten=True)
    assert counted_rows(whole).tolist() == [True, False, False, True, True]
    kept = np.array([3 - mean_score] * 2 + [1 - mean_score] * 2 + [-mean_score] * 2)
    counted = MASK & np.repeat(counted_rows(whole), 3)
    assert whole.advantages[counted] == pytest.approx((kept - kept.mean()) / kept.std(ddof=1), abs=1e-5)
    assert not whole.advantages[~counted].any()


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce", "reinforce_baseline"])
def test_a_batch_whose_episodes_are_all_masked_teaches_nothing_and_has_no_mean(rollout, policy_model, estimator):
    rewards = RewardScores(column([NAN] * 4), {"world": column([NAN] * 4)})
    experience, summary = assembled(rollout, policy_model, rewards, np.zeros(15), estimator=estimator)
    whole = training_batch([experience], whiten=True)
    assert not whole.advantages.any() and not whole.returns.any() and not counted_rows(whole).any()
    assert math.isnan(mean(summary.scores)) and math.isnan(deviation(summary.scores))
    coefficient = AdaptiveKL(0.1, 0.5, 1000)
    coefficient.update(mean_kl([summary]), 0)
    assert coefficient.value == 0.1


def test_only_episodes_to_be_quarantined_are_refused(rollout):
    def request(number, use):
        episode = Episode("world", "error_timeout", use, [], [], [], error=f"reason {number}")
        return RewardRequest(KEYS[number], "p", "r", np.zeros(1, np.int32), np.ones(1, bool), "stop", {},
                             episode=episode)

    require_outcomes([request(0, "train"), request(1, "mask"), request(2, "zero")])
    with pytest.raises(UnscoredSamples) as caught:
        require_outcomes([request(0, "train"), request(1, "quarantine"), request(2, "quarantine")])
    assert [(sample.key, sample.reason) for sample in caught.value.samples] == [
        (KEYS[1], "reason 1"), (KEYS[2], "reason 2")]
