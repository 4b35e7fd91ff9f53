"""Rewards of single tokens through the assembler: however rows are cut into chunks and padded, nothing changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.records import RewardScores, RewardTerms, TokenScores
from rlhf_ray.roles.assembler import Assembler
from tests.unit.roles.conftest import assemble_one, rollout_of

NAMES = ("gae", "reinforce", "reinforce_pp")
MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6).filter(any), min_size=2, max_size=5)


@pytest.fixture(scope="module")
def assemblers(policy_model):
    """By estimator; those whose rows do not look at each other."""
    algorithms = [AlgorithmConfig(estimator={"type": name, "gamma": 0.9}, reward_clip=1.5) for name in NAMES]
    made = {a.estimator.type: Assembler(a, policy_model, 9) for a in algorithms}
    for assembler in made.values():
        assembler.start()
    return made


def assemble(assembler, rollout, columns, scores, rows):
    """Advantages and returns of some rows by themselves."""
    part = rollout.select(rows)
    policy, reference, values, steps = (TokenScores(rollout.offsets, c).select(rows) for c in columns)
    rewards = RewardScores(scores[rows], token_rewards=steps.values)
    critic = [values] if assembler.algorithm.has_critic else []
    experience, _ = assemble_one(assembler, RewardTerms(0.3, 0.5, 2.0), 1, part, rewards, reference, policy, *critic)
    return np.stack([experience.advantages, experience.returns])


@settings(deadline=None, max_examples=30)
@given(masks=MASKS, seed=st.integers(0, 2**16), name=st.sampled_from(NAMES))
def test_the_cut_into_chunks_and_their_order_change_nothing(assemblers, masks, seed, name):
    rollout, rng = rollout_of([[int(m) for m in mask] for mask in masks], seed=seed), np.random.default_rng(seed)
    columns = [np.where(rollout.response_mask, rng.standard_normal(len(rollout.tokens)), 0).astype(np.float32)
               for _ in range(4)]
    scores = rng.standard_normal(len(rollout)).astype(np.float32)
    whole = assemble(assemblers[name], rollout, columns, scores, np.arange(len(rollout)))
    assert (whole[:, ~rollout.response_mask] == 0).all()
    for i in reversed(range(len(rollout))):
        alone = assemble(assemblers[name], rollout, columns, scores, np.array([i]))
        assert alone == pytest.approx(whole[:, rollout.offsets[i] : rollout.offsets[i + 1]], abs=1e-5)
