"""Rewards that say nothing: those of the environments, given to the wrong episodes."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from ray import cloudpickle

from rlhf_ray.records import Prompts, RewardScores, Rollout
from rlhf_ray.roles.reward_scorer import RewardScorer
from tests.roles_in_runs import use_class


class PermutedScores(RewardScorer):
    """Trains on permuted scores; evaluations read the components, which stay."""

    async def score(self, rollout: Rollout, prompts: Prompts) -> RewardScores:
        rewards = await super().score(rollout, prompts)
        scores = np.random.default_rng(rollout.seeds[0]).permutation(rewards.scores)
        return replace(rewards, scores=scores, token_rewards=None)


def permute_rewards(patch: pytest.MonkeyPatch) -> None:
    """In the runs that follow."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    use_class(patch, PermutedScores)
