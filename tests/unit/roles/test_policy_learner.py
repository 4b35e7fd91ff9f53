"""The policy's loss on a few tokens by hand; the model's log-probabilities are given, all else is the learner's own."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_ray.algorithms.logprob_gap import gap_quantile
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.records import Batch, Experience, SampleKey, offsets_of
from rlhf_ray.roles.micro_batch import AverageMeter, PartLoss
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update

# Two rows: one prompt token and two response tokens; one prompt token and one response token.
OFFSETS, MASK = offsets_of([3, 2]), np.array([0, 1, 1, 0, 1], dtype=bool)
NEW = [-1.0, -2.0, -0.5]


def column(values):
    whole = np.zeros(5, dtype=np.float32)
    whole[MASK] = values
    return whole


def batch(advantages=(0.0, 0.0, 0.0), old=NEW, reference=NEW, behaviour=NEW):
    return Batch(
        offsets=OFFSETS, tokens=np.arange(5, dtype=np.int32), response_mask=MASK,
        behaviour_logprobs=column(behaviour), old_logprobs=column(old), reference_logprobs=column(reference),
        values=None, advantages=column(advantages), returns=column(advantages),
    )


@pytest.fixture
def loss_of():
    """loss_of(batch, kl_coef, source of the old log-probabilities, **algorithm) -> (loss, stats, gradient at the three
    response tokens)."""

    def run(part, kl_coef=0.0, source="policy", applied=0, **changes):
        learner = PolicyLearner(PolicyConfig(), ModelConfig(path="m"), 0, 1, 0, 1, AlgorithmConfig(**changes), 1.0,
                                source)
        new = torch.tensor(NEW, requires_grad=True)
        learner.engine = SimpleNamespace(device="cpu", forward=lambda *_, **__: (new, None))
        found = learner.loss(part, Update(kl_coef, applied))
        found.loss.backward()
        assert found.means["loss"] == found.loss and found.tokens == 3
        return found.loss.item(), {name: value.tolist() for name, value in found.token_means.items()}, new.grad.tolist()

    return run


@pytest.mark.parametrize(("estimator", "kl", "slope"), [
    ("k2", [0.125, 0.03125, 0.0], [0.5, -0.25, 0.0]),
    ("k3", [np.exp(-0.5) - 0.5, np.exp(0.25) - 1.25, 0.0], [1 - np.exp(-0.5), 1 - np.exp(0.25), 0.0]),
    ("abs", [0.5, 0.25, 0.0], [1, -1, 0]),
])
def test_the_penalty_in_the_loss(loss_of, estimator, kl, slope):
    part = batch(reference=[-1.5, -1.75, -0.5])
    loss, stats, gradient = loss_of(part, 0.3, kl={"placement": "loss", "estimator": estimator, "unbiased": False})
    assert loss == pytest.approx(0.3 * sum(kl) / 3, abs=1e-6)
    assert stats["kl_penalty"] == pytest.approx(sum(kl) / 3, abs=1e-6)
    assert gradient == pytest.approx([0.3 * s / 3 for s in slope], abs=1e-6)
    # Times the ratio, which is 1 with a gradient of its own: r k has the gradient k' + k.
    loss, _, gradient = loss_of(part, 0.3, kl={"placement": "loss", "estimator": estimator})
    assert loss == pytest.approx(0.3 * sum(kl) / 3, abs=1e-6)
    assert gradient == pytest.approx([0.3 * (s + k) / 3 for s, k in zip(slope, kl, strict=True)], abs=1e-6)


def test_without_a_coefficient_the_penalty_is_measured_and_without_a_reference_it_is_not(loss_of):
    part = batch([1.0, -2.0, 0.5], old=[-1.1, -2.2, -0.4], reference=[-1.5, 900.0, -0.5])
    kl = {"placement": "loss", "estimator": "k3"}
    loss, stats, gradient = loss_of(part, 0.0, kl=kl)
    alone, told, gradient_alone = loss_of(replace(part, reference_logprobs=None), 0.0, kl=kl)
    assert (loss, gradient) == (alone, gradient_alone) and any(gradient), "an infinite penalty leaves no trace"
    assert not np.isfinite(stats.pop("kl_penalty")) and told == stats


def test_the_penalty_is_averaged_as_the_loss_is(loss_of):
    part = batch(reference=[-1.5, -1.75, -1.0])
    kl = {"placement": "loss", "estimator": "abs"}
    loss, stats, _ = loss_of(part, 1.0, aggregate="sequence", kl=kl)
    assert loss == pytest.approx(((0.5 + 0.25) / 2 + 0.5) / 2)
    assert stats["kl_penalty"] == pytest.approx(1.25 / 3), "statistics are means over tokens"


def test_a_penalty_in_the_rewards_is_none_in_the_loss(loss_of):
    loss, stats, gradient = loss_of(batch(reference=[-1.5, -1.75, -0.5]), 0.3)
    assert loss == 0 and gradient == [0, 0, 0] and "kl_penalty" not in stats


WEIGHTS = [4.0, 0.5, 1.0]
"""exp(old - behaviour) of the three response tokens."""


@pytest.mark.parametrize(("changes", "weights"), [
    ({"tokens": "none"}, [1, 1, 1]),
    ({}, [2, 0.5, 1]),
    ({"tokens": "mask"}, [0, 0.5, 1]),
    ({"cap": 3.0}, [3, 0.5, 1]),
    ({"tokens": "mask", "level": "sequence", "cap": 1.5}, [0, 0, 1]),
])
def test_importance_weights_are_the_configured_ones(loss_of, changes, weights):
    part = batch([1.0, 2.0, 3.0], behaviour=np.array(NEW) - np.log(WEIGHTS))
    loss, stats, _ = loss_of(part, importance=changes)
    assert loss == pytest.approx(-sum(w * a for w, a in zip(weights, (1, 2, 3), strict=True)) / 3, abs=1e-6)
    assert ("is_weight_mean" in stats) is (changes != {"tokens": "none"})


def test_the_ratio_is_the_configured_one(loss_of):
    part = batch([1.0, 1.0, 0.0], old=[-1.3, -2.1, -0.5])
    wide, plain = {"clip_high": 10.0}, {"tokens": "none"}
    assert loss_of(part, loss=wide, importance=plain)[0] == pytest.approx(-(np.exp(0.3) + np.exp(0.1)) / 3, rel=1e-6)
    by_row = {**wide, "ratio": "sequence"}
    assert loss_of(part, loss=by_row, importance=plain)[0] == pytest.approx(-2 * np.exp(0.2) / 3, rel=1e-6)


def test_each_update_weighs_the_penalty_by_the_coefficient_it_is_given():
    algorithm = AlgorithmConfig(epochs=1, mini_batches=1, estimator={"type": "gae", "whiten": False},
                                kl={"placement": "loss", "estimator": "k2"})
    learner, losses = PolicyLearner(PolicyConfig(), ModelConfig(path="m"), 0, 1, 0, 1, algorithm, 1.0), []

    def step():
        return StepResult(applied=True, grad_norm=1.0, learning_rate=0.1)

    def forward(tokens, packing, predicted, exact_entropy, mask):
        return torch.from_numpy(column(NEW))[tokens[predicted]], None  # tokens are numbered through

    learner.engine = SimpleNamespace(device="cpu", step=step, forward=forward, count_update=lambda _: None,
                                     backward=lambda loss: losses.append(float(loss)))
    part = batch(reference=[-1.5, -1.75, -0.5])
    whole = Experience(**{f.name: getattr(part, f.name) for f in fields(Batch)},
                       keys=[SampleKey(0, row, 0) for row in range(2)])
    told = [learner.update(number, coef, whole) for number, coef in ((3, 0.07), (4, 0.6))]
    # k2 of gaps 0.5, -0.25 and 0: 0.125, 0.03125 and 0.
    penalty = (0.125 + 0.03125) / 3
    assert losses == pytest.approx([0.07 * penalty, 0.6 * penalty], abs=1e-7)
    assert [stats.metrics["kl_penalty"] for stats in told] == pytest.approx([penalty] * 2, abs=1e-7)


def test_rows_that_do_not_count_add_nothing_to_loss_and_statistics(monkeypatch):
    """A rank with nothing left joins a collective pass with another's row."""
    learner = PolicyLearner(PolicyConfig(), ModelConfig(path="m"), 0, 1, 0, 1, AlgorithmConfig(), 1.0)
    meter, rows = AverageMeter(), batch()
    losses = iter([PartLoss(torch.tensor(2.0), {"loss": torch.tensor(2.0)}, 3.0, {"clip_fraction": torch.tensor(0.5)}),
                   PartLoss(torch.tensor(7.0), {"loss": torch.tensor(7.0)}, 3.0, {"clip_fraction": torch.tensor(1.0)})])
    monkeypatch.setattr(learner, "parts", lambda *_: [(rows, True), (rows, False)])
    assert [float(share) for share in learner.shares(rows, lambda _: next(losses), meter)] == [2.0, 0.0]
    assert meter.means() == {"loss": 2.0, "clip_fraction": 0.5}


def test_the_gap_to_the_generator_is_measured_while_the_weights_are_those_that_generated(loss_of):
    part = batch(behaviour=[-1.25, -2.0, -1.0])
    stats = loss_of(part, source="update")[1]
    assert stats["logprob_gap"] == pytest.approx((0.25 + 0.0 + 0.5) / 3)
    assert [gap_quantile(stats["logprob_gap_shares"], share) for share in (0.3, 0.6, 0.9)] == pytest.approx(
        [1e-7, 0.25, 0.5], rel=0.27)
    assert "logprob_gap" not in loss_of(part)[1], "the assembler measures it with the policy's own pass"
    assert "logprob_gap" not in loss_of(part, source="update", applied=1)[1], "the weights have changed"
