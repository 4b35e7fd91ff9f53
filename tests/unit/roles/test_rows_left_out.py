"""Rows that are not passed: those without advantage, which still count, and those of truncated samples, which do not.

Real learners and a small model in float64; a plain AdamW takes DeepSpeed's place. What is left out is compared with
updates in which it is not, or that never had it.
"""

from copy import deepcopy
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel
from rlhf_ray.records import Batch, Experience, SampleKey
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.micro_batch import AverageMeter
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update, training_batch
from tests.unit.roles.test_combined_losses import batch, tiny_model

ROWS = 8
UNWHITENED = {"type": "gae", "whiten": False}
NO_ADVANTAGE, TRUNCATED = [0, 3, 4], [1, 2, 6]


class Engine:
    """Passes and steps of a module by plain torch; counts the tokens that were passed."""

    device = "cpu"

    def __init__(self, module):
        self.module, self.passed, self.steps = deepcopy(module), 0, 0
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.05, weight_decay=0.1)

    def forward(self, tokens, *rest, **named):
        self.passed += len(tokens)
        return self.module(tokens, *rest, **named)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.steps += 1
        return StepResult(True, 1.0, 0.05)

    def count_update(self, applied):
        pass

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])


class Values(torch.nn.Module):
    """The values of an actor-critic, one token earlier, as the critic's module returns them."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens, packing):
        every = torch.arange(1, len(tokens))
        return torch.cat([self.module(tokens, packing, every)[2], torch.zeros(1, dtype=torch.float64)])


@pytest.fixture(scope="module")
def modules():
    """The module of each learner, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        both = PackedActorCritic(tiny_model(), 0.9).double()
        torch.nn.init.normal_(both.value_head.weight)
        return {PolicyLearner: PackedLanguageModel(tiny_model(), 0.9).double(), ActorCriticLearner: both,
                CriticLearner: Values(both)}


def experience(no_advantage=(), truncated=(), **changes):
    """Random rows, without a reference; some without advantage, some truncated. Rows 1 and 2 are of one sample."""
    rows = replace(batch(3, ROWS), reference_logprobs=None)
    without = np.isin(np.repeat(np.arange(ROWS), rows.lengths), no_advantage)
    columns = {f.name: getattr(rows, f.name) for f in fields(Batch)}
    columns |= {"advantages": np.where(without, 0, rows.advantages).astype(np.float32),
                "samples": np.array([0, 1, 1, 2, 3, 4, 5, 6]),
                "row_weights": np.array([1, 0.3, 0.7, 1, 1, 1, 1, 1], dtype=np.float32),
                "finish_reasons": ["length" if row in truncated and row != 1 else "stop" for row in range(ROWS)]}
    return Experience(**(columns | changes), keys=[SampleKey(0, sample, 0) for sample in range(7)])


def learner(modules, cls=PolicyLearner, rank=0, world=1, budget=30, algorithm=None, policy=None):
    options = AlgorithmConfig(**{"epochs": 2, "mini_batches": 1, "estimator": UNWHITENED, **(algorithm or {})})
    config = (CriticConfig if cls is CriticLearner else PolicyConfig)(micro_batch_tokens=budget, **(policy or {}))
    rest = () if cls is CriticLearner else (0.9,)
    made = cls(config, ModelConfig(path="unused"), rank, world, 3, 10, options, *rest)
    made.engine = Engine(modules[cls])
    return made


def updated(made, *experiences):
    """(weights after an update, its statistics: the policy's where there are two)."""
    if isinstance(made, CriticLearner):
        stats = made.update(0, *experiences)
    elif isinstance(made, ActorCriticLearner):
        stats = made.update_both(0, 0.0, *experiences)[0]
    else:
        stats = made.update(0, 0.0, *experiences)
    return made.engine.weights(), stats


@pytest.mark.parametrize("algorithm", [
    {}, {"aggregate": "sequence"}, {"loss": "cispo", "aggregate": "sequence"},
    {"importance": {"tokens": "band", "masks": ["outlier"], "outlier": (0.5, 2.0)}}], ids=str)
def test_the_update_is_the_same_with_rows_without_advantage_left_out(modules, algorithm, monkeypatch):
    made, rows = learner(modules, algorithm=algorithm), experience(NO_ADVANTAGE)
    weights, stats = updated(made, rows)
    kept = np.delete(rows.lengths, NO_ADVANTAGE).sum()
    assert made.engine.passed == stats.tokens == 2 * kept

    monkeypatch.setattr(PolicyLearner, "_skips_zero_advantages", lambda *_: False)
    whole = learner(modules, algorithm=algorithm)
    all_weights, all_stats = updated(whole, rows)
    assert whole.engine.passed == all_stats.tokens == 2 * rows.lengths.sum()
    torch.testing.assert_close(weights, all_weights, rtol=0, atol=1e-10)
    assert (weights - Engine(modules[PolicyLearner]).weights()).abs().max() > 0.05, "an update that shows"
    assert stats.metrics["loss"] == pytest.approx(all_stats.metrics["loss"], rel=1e-6)
    assert stats.metrics["zero_advantage_rows"] == pytest.approx(3 / 8)


def test_statistics_of_tokens_are_of_the_rows_that_are_passed(modules):
    passed = learner(modules, algorithm={"epochs": 1})
    alone = learner(modules, algorithm={"epochs": 1})
    names = ("approx_kl", "ratio_mean", "clip_fraction", "is_weight_mean")
    stats = updated(passed, experience(NO_ADVANTAGE))[1].metrics
    kept = [5, 7]  # and the sample of rows 1 and 2, and row 6
    rows = experience()
    others = updated(alone, rows.select([1, 2, *kept[:1], 6, *kept[1:]]))[1].metrics
    assert {name: stats[name] for name in names} == pytest.approx({name: others[name] for name in names}, rel=1e-6)


@pytest.mark.parametrize("world", [2, 3, 9])
@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_all_ranks_make_as_many_passes_and_add_up_to_the_same_gradient(modules, world, aggregate, monkeypatch):
    rows = training_batch([experience(NO_ADVANTAGE)], whiten=False)

    def gradient_of(ranks):
        total, meter, passes = 0, AverageMeter(), []
        for rank in range(ranks):
            made = learner(modules, rank=rank, world=ranks, algorithm={"aggregate": aggregate})
            losses = []
            made.engine.backward = lambda loss, made=made, losses=losses: (losses.append(loss), loss.backward())
            made.engine.step = lambda: StepResult(True, 1.0, 0.1)
            made.optimize(rows, made.chosen_rows(rows), Update(), meter)
            total = total + torch.cat([p.grad.flatten() for p in made.engine.module.parameters()])
            passes.append(len(losses))
        return total, meter.means(), passes

    found, means, passes = gradient_of(world)
    assert len(set(passes)) == 1
    monkeypatch.setattr(PolicyLearner, "_skips_zero_advantages", lambda *_: False)
    whole, of_whole, _ = gradient_of(1)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-8)  # weights of rows are float32
    assert means["loss"] == pytest.approx(of_whole["loss"], rel=1e-6)
    assert means["zero_advantage_rows"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(("cls", "algorithm", "policy"), [
    (PolicyLearner, {"entropy_coef": 0.1}, {}), (PolicyLearner, {"target_kl": 0.5}, {}),
    (PolicyLearner, {"kl": {"placement": "loss"}}, {}), (PolicyLearner, {}, {"router_aux_loss_coef": 0.1}),
    (ActorCriticLearner, {}, {}), (CriticLearner, {}, {}), (PolicyLearner, {}, {})])
def test_rows_are_left_out_only_where_nothing_else_depends_on_them(modules, cls, algorithm, policy):
    rows = training_batch([experience(NO_ADVANTAGE, reference_logprobs=batch(3, ROWS).reference_logprobs)], False)
    chosen = learner(modules, cls, algorithm=algorithm, policy=policy).chosen_rows(rows)
    assert chosen.counted.tolist() == list(range(ROWS))
    everything_alone = cls is PolicyLearner and not algorithm and not policy
    assert (len(chosen.passed) < ROWS) is everything_alone


def test_an_advantage_that_is_no_number_is_not_left_out(modules):
    rows = experience(range(ROWS))
    advantages = rows.advantages.copy()
    advantages[rows.offsets[3] - 1] = np.nan
    batch_of = training_batch([replace(rows, advantages=advantages)], whiten=False)
    assert learner(modules).chosen_rows(batch_of).passed.tolist() == [2]


def test_without_any_advantage_one_row_is_passed_and_the_optimizer_steps_as_before(modules, monkeypatch):
    first, rows = learner(modules), experience()
    updated(first, rows)
    first.last_update = None
    second = deepcopy(first)
    nothing = experience(range(ROWS))
    passed = first.engine.passed
    weights, stats = updated(first, nothing)
    assert first.engine.passed - passed == 2 * rows.lengths.min() == stats.tokens
    assert stats.applied == 2 and stats.metrics["loss"] == 0
    assert stats.metrics["zero_advantage_rows"] == 7 / 8
    assert np.isfinite(stats.metrics["approx_kl"])
    monkeypatch.setattr(PolicyLearner, "_skips_zero_advantages", lambda *_: False)
    before = second.engine.weights()
    torch.testing.assert_close(weights, updated(second, nothing)[0], rtol=0, atol=0)
    assert (weights - before).abs().max() > 1e-3, "momentum and weight decay act"


@pytest.mark.parametrize("cls", [PolicyLearner, CriticLearner, ActorCriticLearner])
@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("whiten", [False, True])
def test_truncated_samples_are_as_if_they_were_not_in_the_batch(modules, cls, aggregate, whiten):
    algorithm = {"aggregate": aggregate, "entropy_coef": 0.1, "epochs": 1,
                 "estimator": {"type": "gae", "whiten": whiten}}
    rows = experience(truncated=TRUNCATED)
    filtered = learner(modules, cls, algorithm={**algorithm, "overlong_filter": True})
    weights, stats = updated(filtered, rows)
    never = learner(modules, cls, algorithm=algorithm)
    expected, of_never = updated(never, rows.select(np.delete(np.arange(ROWS), TRUNCATED)))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-7 if whiten else 1e-10)  # whitening is in float32
    assert stats.metrics["loss"] == pytest.approx(of_never.metrics["loss"], rel=1e-5, abs=1e-7)
    assert filtered.engine.passed == never.engine.passed == stats.tokens
    unfiltered = updated(learner(modules, cls, algorithm=algorithm), rows)[0]
    assert (weights - unfiltered).abs().max() > 1e-3


def test_rows_of_masked_episodes_are_as_if_they_were_not_in_the_batch(modules):
    algorithm = {"aggregate": "token", "epochs": 1, "estimator": {"type": "gae", "whiten": True}}
    rows = experience()
    masked = replace(rows, counted=~np.isin(np.arange(ROWS), TRUNCATED))
    weights, stats = updated(learner(modules, PolicyLearner, algorithm=algorithm), masked)
    expected, of_never = updated(learner(modules, PolicyLearner, algorithm=algorithm),
                                 rows.select(np.delete(np.arange(ROWS), TRUNCATED)))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-7)
    for name in ("loss", "entropy", "advantage_mean"):
        assert stats.metrics[name] == pytest.approx(of_never.metrics[name], rel=1e-5, abs=1e-7), name


def test_a_sample_is_truncated_if_its_last_row_did_not_end(modules):
    reasons = ["stop", "length", "stop", "abort", "stop", "length", "stop", "stop"]
    rows = training_batch([experience(finish_reasons=reasons)], whiten=False)
    chosen = learner(modules, algorithm={"overlong_filter": True}).chosen_rows(rows)
    assert chosen.passed.tolist() == chosen.counted.tolist() == [0, 1, 2, 4, 6, 7]


def test_truncated_rows_are_not_whitened_with_the_others():
    rows = experience(truncated=TRUNCATED)
    whitened = training_batch([rows], whiten=True, overlong_filter=True)
    kept = ~np.isin(np.repeat(np.arange(ROWS), rows.lengths), TRUNCATED) & rows.response_mask
    numbers = rows.advantages[kept].astype(np.float64)
    assert whitened.advantages[kept] == pytest.approx((numbers - numbers.mean()) / numbers.std(ddof=1), abs=1e-5)
    assert not whitened.advantages[~kept].any()


@pytest.mark.parametrize("cls", [PolicyLearner, CriticLearner, ActorCriticLearner])
def test_an_update_of_truncated_samples_alone_steps_with_a_gradient_of_zero(modules, cls):
    made = learner(modules, cls, algorithm={"overlong_filter": True})
    before = made.engine.weights()
    weights, stats = updated(made, experience(truncated=range(ROWS)))
    assert (stats.applied, stats.tokens, made.engine.steps) == (2, 0, 2)
    trained = torch.cat([torch.full((p.numel(),), p.grad is not None) for p in made.engine.module.parameters()])
    expected = torch.where(trained, before * (1 - 0.05 * 0.1) ** 2, before)  # weight decay alone
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


def test_the_filter_needs_finish_reasons(modules):
    rows = training_batch([experience(finish_reasons=None)], whiten=False)
    assert len(learner(modules).chosen_rows(rows).passed) == ROWS
    with pytest.raises(ValueError, match="no finish reasons"):
        learner(modules, algorithm={"overlong_filter": True}).chosen_rows(rows)
