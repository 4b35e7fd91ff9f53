"""Every option of the losses reaches them: with it a learner's loss is the one worked out here, not that without it.

What is worked out here is numpy on a few tokens, apart from the package's own losses. Model and engine are left out;
the learners are the real ones.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig, KLConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.records import Batch, offsets_of
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update

KL_COEF = 0.3
LENGTHS = [4, 2, 3]
"""Response tokens of each row, behind one prompt token."""
ROWS = np.repeat([0, 1, 2], LENGTHS)
NEW = np.array([-1.0, -2.0, -0.5, -1.5, -0.7, -1.2, -2.5, -0.3, -0.9])
OLD = NEW - [0.5, -0.6, 0.1, 0.3, -0.9, 1.6, 0.02, -0.1, 0.4]
BEHAVIOUR = OLD - [0.9, -0.2, 0.3, 0.1, 0.5, 0.6, -0.7, 1.2, 0.1]
REFERENCE = NEW - [0.3, -0.4, 0.8, 0.1, -0.6, 0.2, 0.5, -0.3, 0.7]
ADVANTAGES = np.array([1.0, -2.0, 0.5, -0.3, 1.5, -0.8, -1.1, 2.0, 0.4])
ENTROPY = np.array([0.4, 1.1, 0.9, 0.2, 0.6, 1.3, 0.8, 0.5, 0.7])
VALUES = np.array([0.1, -0.5, 0.9, 0.4, 1.2, -0.2, 0.6, -1.0, 0.3])
OLD_VALUES = VALUES - [0.5, -0.1, 0.3, -0.6, 0.05, 0.9, -0.4, 0.2, 0.7]
RETURNS = OLD_VALUES + [0.3, 0.8, -0.4, 0.1, -0.9, 1.1, 0.6, -0.2, 0.5]
MASK = np.concatenate([[False] + [True] * n for n in LENGTHS])

POLICY = [
    {"loss": {"clip_low": 0.05}}, {"loss": {"clip_high": 0.6}}, {"loss": {"dual_clip": 1.3}},
    {"loss": {"ratio": "sequence"}}, {"aggregate": "sequence"}, {"importance": {"tokens": "none"}},
    {"importance": {"tokens": "mask"}}, {"importance": {"cap": 1.3}}, {"importance": {"level": "sequence"}},
    {"importance": {"tokens": "mask", "cap": 1.3}}, {"entropy_coef": 0.2},
    {"entropy_coef": 0.2, "aggregate": "sequence"},
    {"importance": {"tokens": "band"}}, {"importance": {"tokens": "band", "band": (0.9, 1.5)}},
    {"importance": {"masks": ["geometric"]}}, {"importance": {"masks": ["geometric"], "geometric": (0.8, 1.3)}},
    {"importance": {"masks": ["outlier"], "outlier": (0.4, 2.0)}},
    {"importance": {"tokens": "none", "masks": ["geometric", "outlier"], "geometric": (0.8, 1.5),
                    "outlier": (0.4, 3.0)}},
    {"loss": {"type": "cispo"}}, {"loss": {"type": "cispo", "max_ratio": 1.2}},
    {"loss": {"type": "cispo", "min_ratio": 0.8, "max_ratio": 1.2}, "aggregate": "sequence", "entropy_coef": 0.1},
    *({"kl": {"placement": "loss", "estimator": estimator}} for estimator in ("k1", "k2", "k3", "abs")),
    {"kl": {"placement": "loss", "unbiased": False}}, {"kl": {"placement": "loss"}, "loss": {"type": "cispo"}},
    {"kl": {"placement": "loss"}, "aggregate": "sequence", "loss": {"dual_clip": 1.3},
     "importance": {"tokens": "mask"}, "entropy_coef": 0.1},
]
CRITIC = [{"value_clip": 0.05}, {"value_clip": None}, {"aggregate": "sequence"}]
BOTH = [*POLICY, *CRITIC, {"value_coef": 0.7}]
ELSEWHERE = {
    "estimator", "reward_normalisation", "reward_clip",
    "missing_eos_penalty", "overlong_buffer", "overlong_penalty",  # the assembler's: test_assembler, test_token_rewards
    "epochs", "mini_batches",  # of the batch, before the loss: test_updates
    "dynamic_sampling",  # the pipeline's: coordinator/test_dynamic_sampling
    "preset",  # fills in others: test_presets
    "overlong_filter",  # whether a row is passed: test_rows_left_out
    "old_logprobs",  # settled as `Derived.old_logprobs`, which the learner is given apart: below
    "critic_warmup_steps",  # the coordinator's
    "target_kl",  # whether a step is made: test_target_kl
}
ELSEWHERE_OF_KL = {"coef", "kind", "target", "horizon"}
"""The controller's: it gives an update its coefficient."""


def mean(values, aggregate="token"):
    if aggregate == "token":
        return values.mean()
    return np.mean([values[row == ROWS].mean() for row in range(3)])


def of_rows(values, how):
    """Each token's row's sum or mean."""
    return np.array([how(values[row == ROWS]) for row in ROWS])


def policy_oracle(a: AlgorithmConfig, old=OLD):
    clip, importance = a.loss, a.importance
    if clip.type == "cispo":
        return mean(-np.clip(np.exp(NEW - old), clip.min_ratio, clip.max_ratio) * ADVANTAGES * NEW,
                    a.aggregate) + other_terms(a, old)
    ratio = np.exp(NEW - old if clip.ratio == "token" else of_rows(NEW - old, np.mean))
    losses = np.maximum(-ADVANTAGES * ratio, -ADVANTAGES * np.clip(ratio, 1 - clip.clip_low, 1 + clip.clip_high))
    if clip.dual_clip is not None:
        losses = np.where(ADVANTAGES < 0, np.minimum(losses, -ADVANTAGES * clip.dual_clip), losses)
    weights = np.exp(old - BEHAVIOUR if importance.level == "token" else of_rows(old - BEHAVIOUR, np.sum))
    low, high = importance.band
    losses = losses * {"none": np.ones(len(NEW)), "truncate": np.minimum(weights, importance.cap),
                       "mask": np.where(weights > importance.cap, 0, weights),
                       "band": np.where((weights < low) | (weights > high), 0, weights)}[importance.tokens]
    if "geometric" in importance.masks:
        averages, (low, high) = np.exp(of_rows(old - BEHAVIOUR, np.mean)), importance.geometric
        losses = losses * ((averages >= low) & (averages <= high))
    if "outlier" in importance.masks:
        low, high = np.log(importance.outlier)
        losses = losses * ((of_rows(old - BEHAVIOUR, np.min) >= low) & (of_rows(old - BEHAVIOUR, np.max) <= high))
    return mean(losses, a.aggregate) + other_terms(a, old)


def other_terms(a: AlgorithmConfig, old):
    """The KL penalty and the entropy bonus."""
    loss = -a.entropy_coef * mean(ENTROPY, a.aggregate)
    if a.kl.placement == "loss":
        gap = NEW - REFERENCE
        kl = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap, "abs": abs(gap)}[a.kl.estimator]
        loss += KL_COEF * mean(kl * np.exp(NEW - old) if a.kl.unbiased else kl, a.aggregate)
    return loss


def value_oracle(a: AlgorithmConfig):
    errors = (VALUES - RETURNS) ** 2
    if a.value_clip is not None:
        clipped = OLD_VALUES + np.clip(VALUES - OLD_VALUES, -a.value_clip, a.value_clip)
        errors = np.maximum(errors, (clipped - RETURNS) ** 2)
    return mean(errors, a.aggregate) / 2


def whole(values):
    column = np.zeros(len(MASK), dtype=np.float64)
    column[MASK] = values
    return column


def batch():
    return Batch(offsets=offsets_of([n + 1 for n in LENGTHS]), tokens=np.arange(len(MASK), dtype=np.int32),
                 response_mask=MASK, behaviour_logprobs=whole(BEHAVIOUR), old_logprobs=whole(OLD),
                 reference_logprobs=whole(REFERENCE), values=whole(OLD_VALUES), advantages=whole(ADVANTAGES),
                 returns=whole(RETURNS))


def forward(tokens, packing, predicted, exact_entropy, mask=None):
    """What a language model answers; entropies where they are asked for alone."""
    return torch.tensor(NEW), torch.tensor(ENTROPY) if exact_entropy else None


def policy_learner(cls, algorithm, old_logprobs="policy"):
    learner = cls(PolicyConfig(), ModelConfig(path="m"), 0, 1, 0, 1, algorithm, 1.0, old_logprobs)
    learner.engine = SimpleNamespace(device="cpu", forward=forward)
    return learner


def loss_of_policy(a):
    return float(policy_learner(PolicyLearner, a).loss(batch(), Update(KL_COEF)).loss)


def loss_of_critic(a):
    learner = CriticLearner(CriticConfig(), ModelConfig(path="m"), 0, 1, 0, 1, a)
    before = np.append(whole(VALUES)[1:], 0.0)  # the value of the state before a token stands one token earlier
    learner.engine = SimpleNamespace(device="cpu", forward=lambda *_: torch.tensor(before))
    return float(learner.loss(batch()).loss)


def loss_of_both(a):
    learner = policy_learner(ActorCriticLearner, a)
    learner.engine.forward = lambda *asked, mask: (*forward(*asked, mask), torch.tensor(VALUES))
    return float(learner.loss(batch(), Update(KL_COEF)).loss)


LEARNERS = {
    "policy": (loss_of_policy, policy_oracle, POLICY), "critic": (loss_of_critic, value_oracle, CRITIC),
    "both": (loss_of_both, lambda a: policy_oracle(a) + a.value_coef * value_oracle(a), BOTH),
}


def test_the_entropy_that_a_bonus_needs_is_reported():
    found = policy_learner(PolicyLearner, AlgorithmConfig(entropy_coef=0.2)).loss(batch(), Update())
    assert float(found.token_means["entropy"]) == pytest.approx(ENTROPY.mean(), abs=1e-9)


@pytest.mark.parametrize(("name", "options"), [(n, options) for n, (*_, many) in LEARNERS.items() for options in many])
def test_an_option_changes_the_loss_as_it_is_worked_out_by_hand(name, options):
    loss_of, oracle, _ = LEARNERS[name]
    plain, changed = AlgorithmConfig(), AlgorithmConfig(**options)
    assert loss_of(plain) == pytest.approx(oracle(plain), abs=1e-9)
    assert loss_of(changed) == pytest.approx(oracle(changed), abs=1e-9)
    without = [{k: v for k, v in options.items() if k != left_out} for left_out in options]
    for fewer in without:
        assert abs(oracle(AlgorithmConfig(**fewer)) - oracle(changed)) > 1e-3, f"{fewer} would pass for {options}"


def test_the_updates_own_log_probabilities_stand_for_the_old_ones_where_they_are_chosen():
    learner = policy_learner(PolicyLearner, AlgorithmConfig(), "update")
    loss = float(learner.loss(batch(), Update()).loss)
    assert loss == pytest.approx(policy_oracle(AlgorithmConfig(), old=NEW), abs=1e-9)
    assert abs(policy_oracle(AlgorithmConfig(), old=NEW) - policy_oracle(AlgorithmConfig())) > 1e-3


def test_every_option_of_the_algorithm_is_tried_here_or_said_to_be_elsewhere():
    tried = {name for options in BOTH for name in options}
    assert AlgorithmConfig.model_fields.keys() == tried | ELSEWHERE
    assert not tried & ELSEWHERE
    tried_of_kl = {name for options in BOTH for name in options.get("kl", {})}
    assert KLConfig.model_fields.keys() == tried_of_kl | ELSEWHERE_OF_KL and not tried_of_kl & ELSEWHERE_OF_KL
