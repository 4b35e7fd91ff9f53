"""`algorithm.target_kl`: which mini-batch ends an update, by the mean KL worked out here; and what the update reports.

The model's log-probabilities move at each optimizer step by a given amount; all else is the learner's own.
"""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.estimators import GAEEstimator
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.records import Batch, Experience, SampleKey, offsets_of
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.policy_learner import PolicyLearner

ROWS, MOVED = 4, 0.2
"""Rows of one prompt token and two response tokens each; nats by which each step moves every log-probability."""
ADVANTAGES = np.array([1.0, 2.0, -1.0, 4.0, 0.0, 3.0, 2.0, 1.0], dtype=np.float32)
RETURNS = np.array([1.0, 0.0, 2.0, 1.0, 1.0, 3.0, 0.0, 2.0], dtype=np.float32)


def experience():
    mask = np.array([False, True, True] * ROWS)

    def column(values):
        whole = np.zeros(len(mask), dtype=np.float32)
        whole[mask] = values
        return whole

    rows = Batch(offsets=offsets_of([3] * ROWS), tokens=np.arange(3 * ROWS, dtype=np.int32), response_mask=mask,
                 behaviour_logprobs=column(-1.0), old_logprobs=column(-1.0), reference_logprobs=None,
                 values=column(0.5), advantages=column(ADVANTAGES), returns=column(RETURNS))
    return Experience(**{f.name: getattr(rows, f.name) for f in fields(Batch)},
                      keys=[SampleKey(0, row, 0) for row in range(ROWS)])


class Engine:
    """Takes steps as the real one does, for a model of which each one moves all log-probabilities by MOVED."""

    device = "cpu"

    def __init__(self):
        self.applied, self.passed = 0, 0
        self.losses, self.steps = [], []
        """Losses since the last step, and the sum of those of each step."""

    def forward(self, tokens, packing, predicted, exact_entropy, mask=None):
        logprobs = torch.full((len(predicted),), -1.0 + MOVED * self.applied)
        return logprobs, None, torch.full((len(predicted),), 0.5)

    def backward(self, loss):
        self.losses.append(loss)

    def step(self):
        self.steps.append(sum(self.losses))
        self.losses = []
        good = math.isfinite(float(self.steps[-1]))
        self.applied += good
        return StepResult(good, 1.0 if good else math.nan, 0.1)

    def drop_gradients(self):
        self.losses = []

    def pass_over(self, steps):
        self.passed += steps

    def count_update(self, applied):
        pass


def learner_of(cls=PolicyLearner, **algorithm):
    learner = cls(PolicyConfig(micro_batch_tokens=8), ModelConfig(path="m"), 0, 1, 0, 1,
                  AlgorithmConfig(epochs=2, mini_batches=2, estimator=GAEEstimator(whiten=False), **algorithm), 1.0)
    learner.engine = engine = Engine()
    if cls is PolicyLearner:
        learner.engine.forward = lambda *asked, mask: Engine.forward(engine, *asked)[:2]
    return learner


def kl(steps):
    """k3 of the policy that has made so many steps."""
    gap = MOVED * steps
    return math.exp(gap) - 1 - gap


@pytest.mark.parametrize("cls", [PolicyLearner, ActorCriticLearner])
@pytest.mark.parametrize(("target", "made"),
                         [(0.99 * kl(1), 1), (1.01 * kl(1), 2), (1.01 * kl(2), 3), (1.01 * kl(3), 4)])
def test_the_first_mini_batch_beyond_the_target_ends_the_update(cls, target, made):
    learner = learner_of(cls, target_kl=target)
    update = learner.update if cls is PolicyLearner else lambda *given: learner.update_both(*given)[0]
    stats = update(0, 0.0, experience())
    assert (stats.applied, stats.skipped, learner.engine.passed) == (made, 0, 4 - made)
    assert len(learner.engine.steps) == made and not learner.engine.losses, "what was computed beyond it is dropped"
    assert stats.metrics["optimizer_steps"] == made
    assert stats.metrics["approx_kl"] == pytest.approx(np.mean([kl(step) for step in range(made)]), rel=1e-4, abs=1e-7)
    following = update(1, 0.0, experience())
    assert following.applied == 1, "the next update begins with a step, wherever the policy is"


def test_a_step_that_is_not_finite_is_skipped_and_does_not_end_the_update():
    spoilt = experience()
    advantages = spoilt.advantages.copy()
    advantages[1] = np.nan
    stats = learner_of(target_kl=1.01 * kl(3)).update(0, 0.0, replace(spoilt, advantages=advantages))
    assert (stats.applied, stats.skipped) == (2, 2), "one of the two mini-batches of each epoch"


def test_without_a_target_every_step_is_made_and_the_kl_is_reported_in_three_ways():
    stats = learner_of().update(0, 0.0, experience())
    gaps = MOVED * np.arange(4)
    assert stats.applied == 4 and "optimizer_steps" not in stats.metrics
    expected = {"approx_kl": np.mean([kl(step) for step in range(4)]), "approx_kl_k1": -gaps.mean(),
                "approx_kl_k2": (gaps**2).mean() / 2}
    assert {name: stats.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_the_advantages_mean_is_that_before_whitening():
    learner = learner_of()
    learner.algorithm = learner.algorithm.model_copy(update={"estimator": GAEEstimator()})
    assert learner.update(0, 0.0, experience()).metrics["advantage_mean"] == pytest.approx(ADVANTAGES.mean())


def test_the_total_loss_is_the_sum_that_is_minimised():
    alone = learner_of().update(0, 0.0, experience()).metrics
    assert alone["total_loss"] == alone["loss"] != 0
    policy, critic = (stats.metrics for stats in learner_of(ActorCriticLearner, value_coef=0.7).update_both(
        0, 0.0, experience()))
    assert critic["loss"] == pytest.approx(((RETURNS - 0.5) ** 2).mean() / 2)
    assert policy["total_loss"] == pytest.approx(policy["loss"] + 0.7 * critic["loss"])


@pytest.mark.parametrize("cls", [PolicyLearner, ActorCriticLearner])
def test_the_routers_are_balanced_in_every_step_with_a_target_too(cls):
    class Balance:
        def loss(self):
            return torch.tensor(3.0)

    def losses(**algorithm):
        learner = learner_of(cls, **algorithm)
        if coefficient:
            learner.config = learner.config.model_copy(update={"router_aux_loss_coef": coefficient})
            learner._router_balance = Balance()
        stats = (learner.update if cls is PolicyLearner else learner.update_both)(0, 0.0, experience())
        return torch.stack(learner.engine.steps), stats[0] if isinstance(stats, tuple) else stats

    coefficient = 0.0
    without, _ = losses(target_kl=9.0)
    coefficient = 0.5
    balanced, stats = losses(target_kl=9.0)
    torch.testing.assert_close(balanced - without, torch.full((4,), 0.5 * 3.0))
    assert stats.metrics["router_aux_loss"] == pytest.approx(3.0)
    torch.testing.assert_close(balanced, losses()[0])
