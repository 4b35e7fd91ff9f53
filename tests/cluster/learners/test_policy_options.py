"""What may be added to the policy's learner, on real DeepSpeed ranks: an average of its weights, pretraining text, and
the critic as a second head."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.algorithm import AlgorithmConfig, PtxConfig
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import TokenScores
from rlhf_ray.roles.ppo_update import mini_batches, training_batch
from tests.cluster.learners.plain_torch import (
    LARGE,
    OPTIMIZER,
    SEED,
    SMALL,
    algorithm,
    assert_same_update,
    critic_terms,
    load_policy,
    make_rollout,
    make_sequences,
    numbers,
    plain_adamw,
    plain_logprobs,
    plain_step,
    policy_arguments,
    policy_terms,
    row_values,
    sft_loss,
)

pytestmark = pytest.mark.cluster
DECAY = 0.7


def averaged(files, zero=1, budget=SMALL, **algorithm):
    """Arguments of a policy that keeps an average of its weights."""
    algo = AlgorithmConfig(estimator={"type": "gae", "whiten": False}, **{"epochs": 1, "mini_batches": 1, **algorithm})
    arguments = policy_arguments(files, zero, budget, algo=algo)
    return {**arguments, "config": arguments["config"].model_copy(update={"ema_decay": DECAY})}


def average_of(weights):
    """The average by hand, of weights after each optimizer step; the first are those before any."""
    average = {name: value.astype(np.float64) for name, value in weights[0].items()}
    for later in weights[1:]:
        average = {name: DECAY * value + (1 - DECAY) * later[name] for name, value in average.items()}
    return average


def assert_average(found, weights):
    expected = average_of(weights)
    assert set(found) == set(expected)
    for name, value in found.items():
        assert np.abs(value - expected[name]).max() < 1e-6, name
        assert np.abs(value - weights[-1][name]).max() > 1e-3, f"{name} hardly moves"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_average_over_three_updates_is_the_one_by_hand(ranks, files, experiences, zero, world):
    learners = ranks.make(world, "PolicyLearner", averaged(files, zero))
    seen = [learners.weights()]
    for step in range(3):
        learners.do("update", step, 0.0, *experiences)
        seen.append(learners.weights())
    assert_average(learners.weights("average"), seen)


def test_every_optimizer_step_of_an_update_counts(ranks, files, experiences):
    learners = ranks.make(1, "PolicyLearner", averaged(files, budget=LARGE))
    whole = experiences[0].concat(experiences)
    half = whole.select(next(mini_batches(len(whole), 1, 2, SEED, 0)))
    seen = [learners.weights()]
    learners.do("update", 0, 0.0, half)
    seen.append(learners.weights())
    learners = ranks.make(1, "PolicyLearner", averaged(files, budget=LARGE, mini_batches=2))
    learners.do("update", 0, 0.0, *experiences)
    seen.append(learners.weights())
    assert_average(learners.weights("average"), seen)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_average_that_was_saved_goes_on_bit_for_bit(ranks, fresh_ranks, files, experiences, tmp_path, zero):
    learners = ranks.make(2, "PolicyLearner", averaged(files, zero))
    learners.do("update", 0, 0.0, *experiences)
    learners.save(tmp_path)
    saved = learners.weights("average")
    learners.do("update", 1, 0.0, *experiences)
    others = fresh_ranks.make(2, "PolicyLearner", averaged(files, zero))
    others.do("load", str(tmp_path))
    assert all(np.array_equal(value, saved[name]) for name, value in others.weights("average").items())
    others.do("update", 1, 0.0, *experiences)
    ends = learners.weights("average"), others.weights("average")
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in saved)
    assert all(np.abs(ends[0][name] - saved[name]).max() > 0 for name in saved)


def test_a_checkpoint_without_an_average_is_refused_by_a_run_that_keeps_one(ranks, files, experiences, tmp_path):
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files, 1, SMALL))
    learners.save(tmp_path)
    learners = ranks.make(2, "PolicyLearner", averaged(files))
    with pytest.raises(CheckpointError, match=r"no average of the weights: .* without policy.ema_decay"):
        learners.do("load", str(tmp_path))


@pytest.mark.parametrize("zero", [1, 3])
def test_the_exported_average_loads_in_transformers(ranks, files, experiences, tmp_path, zero):
    from transformers import AutoModelForCausalLM

    learners = ranks.make(2, "PolicyLearner", averaged(files, zero))
    learners.do("update", 0, 0.0, *experiences)
    card = ModelCardInfo("ppo", 1, "base", "rows", weights="the average")
    for method, name in (("export", "model"), ("export_average", "model_ema")):
        learners.do(method, str(tmp_path / name), card)
    for which, name in (("weights", "model"), ("average", "model_ema")):
        loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters())
        assert all(np.array_equal(loaded[n].detach().numpy(), w) for n, w in learners.weights(which).items())
    assert "Weights: the average" in (tmp_path / "model_ema/README.md").read_text()
    assert json.loads((tmp_path / "model_ema/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# Pretraining text

COEF = 0.3
TEXT = PtxConfig(path="unused", batch_size=4, coef=COEF)
"""Of make_sequences(1), 9 rows: the third optimizer step reaches into the second epoch."""


def reading(ranks, files, world, zero=1, budget=SMALL, config=TEXT):
    """A policy that has its pretraining text."""
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files, zero, budget))
    learners.do("take_pretraining_text", config, make_sequences(1))
    return learners


@pytest.fixture(scope="module")
def plain_mixed(files, experiences):
    """The update of step 0 in plain torch, weights before and after, and the text's mean loss per token in it."""
    model, text, algo = load_policy(files.tied), make_sequences(1), algorithm()
    before, optimizer, cursor = numbers(model), plain_adamw(model), PromptCursor(len(text), SEED, shuffle=True)
    batch, losses, tokens = training_batch(experiences, True), [], []
    for rows in mini_batches(len(batch), algo.epochs, algo.mini_batches, SEED, 0):
        mini, read = batch.select(rows), text.select([row for _, row in cursor.next(TEXT.batch_size)])
        losses.append(sft_loss(model, read))
        tokens.append(int(read.loss_mask.sum() - read.loss_mask[read.offsets[:-1]].sum()))
        policy = torch.cat([policy_terms(model, mini, i, algo) for i in range(len(mini))]).mean()
        plain_step(model, optimizer, policy + COEF * losses[-1], OPTIMIZER.grad_clip)
    mean = float(np.average([float(loss.detach()) for loss in losses], weights=tokens))
    return (before, numbers(model)), mean


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("zero", "budget"), [(0, SMALL), (1, LARGE), (1, SMALL), (2, SMALL), (3, SMALL)])
def test_the_text_s_gradient_is_added_to_the_policy_s(ranks, files, experiences, plain_mixed, zero, budget, world):
    expected, loss = plain_mixed
    learners = reading(ranks, files, world, zero, budget)
    before = learners.weights()
    stats = learners.do("update", 0, 0.0, *experiences)
    assert_same_update(expected, before, learners.weights())
    assert [s.metrics["ptx_loss"] for s in stats] == [pytest.approx(loss, rel=1e-4)] * world


@pytest.mark.parametrize("zero", [1, 3])
def test_a_coefficient_of_zero_measures_and_changes_nothing(ranks, files, experiences, zero):
    ends, stats = [], []
    for mixed in (False, True):
        learners = ranks.make(2, "PolicyLearner", policy_arguments(files, zero, SMALL))
        if mixed:
            learners.do("take_pretraining_text", TEXT.model_copy(update={"coef": 0.0}), make_sequences(1))
        stats.append(learners.do("update", 0, 0.0, *experiences)[0].metrics)
        ends.append(learners.weights())
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])
    measured = stats[1].pop("ptx_loss")
    assert stats[0] == stats[1] and measured > 1


@pytest.mark.parametrize("zero", [1, 3])
def test_reading_goes_on_bit_for_bit_in_the_middle_of_an_epoch(
    ranks, fresh_ranks, files, experiences, tmp_path, zero
):
    learners = reading(ranks, files, 2, zero)
    learners.do("update", 0, 0.0, *experiences)
    learners.save(tmp_path)
    visited = json.loads((tmp_path / "ptx_0.json").read_text())["visited"]
    assert visited == [4 * TEXT.batch_size] and visited[0] % 9
    uninterrupted = learners.do("update", 1, 0.0, *experiences)
    others = reading(fresh_ranks, files, 2, zero)
    others.do("load", str(tmp_path))
    assert others.do("update", 1, 0.0, *experiences)[0].metrics == uninterrupted[0].metrics
    ends = learners.weights(), others.weights()
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_checkpoint_of_no_text_or_another_is_refused(ranks, files, tmp_path):
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files, 1, SMALL))
    learners.save(tmp_path)
    with pytest.raises(CheckpointError, match="no position in the pretraining text"):
        reading(ranks, files, 2).do("load", str(tmp_path))
    reading(ranks, files, 2).save(tmp_path)
    other = reading(ranks, files, 2)
    other.do("take_pretraining_text", TEXT, make_sequences(1, rows=8))
    with pytest.raises(CheckpointError, match="rows=9, this run rows=8"):
        other.do("load", str(tmp_path))


# One backbone for policy and critic

VALUE_COEF = 0.4


class TwoHeads(torch.nn.Module):
    """Plain torch: the language model, and a value head with the given weight."""

    def __init__(self, model, head):
        super().__init__()
        self.model, self.value_head = model, torch.nn.Linear(head.shape[1], 1, bias=False)
        with torch.no_grad():
            self.value_head.weight.copy_(torch.from_numpy(head))
        self.critic = SimpleNamespace(model=model.model, score=self.value_head)

    def loss(self, batch, algo):
        policy, critic = (
            [terms(model, batch, i, algo) for i in range(len(batch))]
            for terms, model in ((policy_terms, self.model), (critic_terms, self.critic)))
        means = [(torch.cat(rows) if algo.aggregate == "token" else torch.stack([row.mean() for row in rows])).mean()
                 for rows in (policy, critic)]
        return means[0] + algo.value_coef * means[1]


def shared(files, zero=1, budget=SMALL, **changes):
    """Arguments of a learner that is policy and critic."""
    return policy_arguments(files, zero, budget, algo=algorithm(value_coef=VALUE_COEF, **changes))


def both_weights(learners):
    """Weights of backbone and head by name, as plain torch names them."""
    return {**{f"model.{name}": w for name, w in learners.weights().items()}, **learners.weights("value_head")}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("zero", "budget", "changes"), [
    (0, SMALL, {}), (1, LARGE, {}), (1, SMALL, {"aggregate": "sequence", "entropy_coef": 0.3}), (2, SMALL, {}),
    (3, SMALL, {}), (3, SMALL, {"aggregate": "sequence"}),
], ids=str)
def test_the_update_of_both_is_plain_torch_s(ranks, files, experiences, zero, budget, changes, world):
    arguments = shared(files, zero, budget, **changes)
    algo, learners = arguments["algorithm"], ranks.make(world, "ActorCriticLearner", arguments)
    before = both_weights(learners)
    plain = TwoHeads(load_policy(files.tied), before["value_head.weight"])
    first, optimizer, batch = numbers(plain), plain_adamw(plain), training_batch(experiences, True)
    for rows in mini_batches(len(batch), algo.epochs, algo.mini_batches, SEED, 0):
        plain_step(plain, optimizer, plain.loss(batch.select(rows), algo), OPTIMIZER.grad_clip)
    policy, critic = learners.do("update_both", 0, 0.0, *experiences)[0]
    assert_same_update((first, numbers(plain)), before, both_weights(learners))
    assert {"loss", "entropy", "clip_fraction", "approx_kl", "grad_norm", "learning_rate"} <= set(policy.metrics)
    assert set(critic.metrics) == {"loss", "clip_fraction", "value_mean", "value_variance", "error", "return_mean",
                                   "return_variance", "explained_variance", "grad_norm", "learning_rate"}
    assert not any(name.startswith("critic/") for name in policy.metrics)


def test_what_is_said_of_both_does_not_depend_on_the_cut(ranks, files, experiences):
    found = []
    for world, budget in ((1, LARGE), (2, SMALL)):
        learners = ranks.make(world, "ActorCriticLearner", shared(files, 1, budget, aggregate="sequence"))
        found.append([stats.metrics for stats in learners.do("update_both", 0, 0.0, *experiences)[0]])
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("zero", [1, 3])
def test_one_forward_pass_gives_what_two_models_would(ranks, files, experiences, zero, world):
    rollout = make_rollout(experiences[1])
    learners = ranks.make(world, "ActorCriticLearner", shared(files, zero))
    answers = learners.do("logprobs_and_values", rollout)
    logprobs, values = (TokenScores.concat([answer[i] for answer in answers]) for i in (0, 1))
    model = load_policy(files.tied)
    expected = plain_logprobs(model, rollout.tokens, rollout.offsets, rollout.response_mask)
    assert np.abs(logprobs.values - expected).max() < 1e-5
    critic = TwoHeads(model, learners.weights("value_head")["value_head.weight"]).critic
    with torch.no_grad():
        rows = np.concatenate([row_values(critic, rollout.row(i, "tokens")).numpy() for i in range(len(rollout))])
    assert np.abs(values.values - np.where(rollout.response_mask, rows, 0)).max() < 1e-5
    assert np.abs(values.values).max() > 0.1
    alone = TokenScores.concat(learners.do("logprobs", rollout))
    assert np.array_equal(alone.values, logprobs.values)


@pytest.mark.parametrize(("zero", "lora"), [
    (0, None), (1, None), (2, None), pytest.param(3, None, marks=pytest.mark.slow), (1, LoRAConfig(rank=4)),
    (3, LoRAConfig(rank=4))])
def test_all_together_go_on_bit_for_bit(ranks, fresh_ranks, files, experiences, tmp_path, zero, lora):
    arguments = shared(files, zero)
    arguments["config"] = arguments["config"].model_copy(update={"ema_decay": DECAY, "lora": lora})

    def made(group):
        learners = group.make(2, "ActorCriticLearner", arguments)
        learners.do("take_pretraining_text", TEXT, make_sequences(1))
        return learners

    learners = made(ranks)
    learners.do("update_both", 0, 0.0, *experiences)
    learners.save(tmp_path)
    saved = both_weights(learners)
    uninterrupted = learners.do("update_both", 1, 0.0, *experiences)
    others = made(fresh_ranks)
    others.do("load", str(tmp_path))
    assert all(np.array_equal(value, saved[name]) for name, value in both_weights(others).items())
    resumed = others.do("update_both", 1, 0.0, *experiences)
    assert [s.metrics for s in resumed[0]] == [s.metrics for s in uninterrupted[0]]
    assert resumed[0][0].metrics["ptx_loss"] > 0
    for which in ("weights", "value_head", "average"):
        ends = learners.weights(which), others.weights(which)
        assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])
    moved = {name for name, value in both_weights(learners).items() if np.abs(value - saved[name]).max() > 0}
    assert "value_head.weight" in moved
    assert lora is None or all("lora" in name for name in moved - {"value_head.weight"})
    assert len(moved) == len(saved) if lora is None else len(moved) > 10


@pytest.mark.parametrize("zero", [1, 3])
def test_the_head_is_exported_beside_the_model_and_never_published(ranks, files, tmp_path, zero):
    from safetensors.numpy import load_file

    learners = ranks.make(2, "ActorCriticLearner", shared(files, zero))
    assert learners.do("plan_weights", 2**20, [])[0].whole.buckets == 1
    bucket = learners.do("weight_bucket", 1, 0)[0]
    assert {entry.name for entry in bucket.entries} == set(learners.weights())
    learners.do("export", str(tmp_path / "model"), ModelCardInfo("ppo", 1, "base", "rows"))
    learners.do("export_value_head", str(tmp_path / "head.safetensors"))
    assert not any("value" in name for name in load_file(tmp_path / "model/model.safetensors"))
    head = load_file(tmp_path / "head.safetensors")
    assert np.array_equal(head["value_head.weight"], learners.weights("value_head")["value_head.weight"])
