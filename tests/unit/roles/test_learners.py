"""Learners of every kind, on one rank of DeepSpeed, compared with plain torch; what they write, and go on from.

More ranks, other stages of ZeRO and other cuts are compared in tests/cluster/learners.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from rlhf_ray.config.derived import evaluation_metrics
from rlhf_ray.config.load import STAGES
from rlhf_ray.data.supervised_records import Pairs
from rlhf_ray.roles.ppo_update import training_batch
from tests.cluster.learners.plain_torch import (
    COEF,
    LEAVING_OUT,
    STEPS,
    VOCAB,
    algorithm,
    assert_same_update,
    critic_terms,
    load_classifier,
    load_policy,
    make_experiences,
    make_sequences,
    make_step_rows,
    pair_loss,
    partly_useless,
    penalised_terms,
    plain_logprobs,
    plain_supervised,
    plain_update,
    policy_terms,
    row_values,
    sft_loss,
    step_loss,
)
from tests.models import make_tiny_llama, make_tiny_reward_model
from tests.tiny_families import DECODERS, config_of
from tests.unit.config.conftest import MINIMAL
from tests.unit.roles.learner_rank import BALANCED, MARGINS


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy with tied embeddings, a reward model, and a mixture of experts."""
    folder = tmp_path_factory.mktemp("models")
    AutoModelForCausalLM.from_config(config_of("mixtral", **DECODERS["mixtral"])).save_pretrained(folder / "mixture")
    return SimpleNamespace(tied=make_tiny_llama(folder / "tied", vocab=VOCAB), mixture=folder / "mixture",
                           reward=make_tiny_reward_model(folder / "reward", vocab=VOCAB))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("learners")


@pytest.fixture(scope="module")
def results(files, folder):
    """What the process of `learner_rank` returned."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    script = Path(__file__).with_name("learner_rank.py")
    done = subprocess.run([sys.executable, str(script), str(files.tied), str(files.reward), str(files.mixture),
                           str(folder)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return SimpleNamespace(**pickle.loads((folder / "results.pickle").read_bytes()))


@pytest.fixture(scope="module")
def experiences(files):
    return make_experiences(files)


def exported(directory, auto="AutoModelForCausalLM"):
    import transformers

    model = getattr(transformers, auto).from_pretrained(directory)
    return {name: p.detach().float().numpy() for name, p in model.named_parameters()}


def test_the_start_returns_sizes_and_parity(results, files):
    size = sum(p.numel() for p in load_policy(files.tied).parameters())
    result = results.policy["started"]
    assert result["parameters"] == result["trained"] == size
    assert result["probe_difference"] < 1e-4
    with_adapters = results.adapters["started"]
    # Rank 2 on the query projections of two layers, 64 by 64.
    assert with_adapters["trained"] == 2 * 2 * (64 + 64) == with_adapters["parameters"] - size


def test_the_policys_update_with_a_penalty_is_plain_torchs(results, files, experiences):
    algo = algorithm(kl={"placement": "loss"})
    expected = plain_update(load_policy(files.tied), training_batch(experiences, algo.whitens),
                            penalised_terms, algo)
    assert COEF == 0.4
    assert_same_update(expected, results.policy["before"], results.policy["after"])


def test_rows_left_out_are_as_if_truncated_ones_were_absent_and_the_others_trained(results, files, experiences):
    """Plain torch runs all rows that are not truncated, those without advantage too, and takes the mean over them."""
    def terms(model, mini, i, algo):
        return policy_terms(model, mini, i, algo) if mini.finish_reasons[i] == "stop" else torch.zeros(0)

    algo = algorithm(**LEAVING_OUT)
    useless = partly_useless(experiences)
    batch = training_batch(useless, False)
    expected = plain_update(load_policy(files.tied), batch, terms, algo)
    assert_same_update(expected, results.left_out["before"], results.left_out["after"])
    stats = results.left_out["stats"]
    passed = [row for row in range(len(batch)) if batch.finish_reasons[row] == "stop"
              and batch.row(row, "advantages").any()]
    assert stats.tokens == 2 * batch.lengths[passed].sum() < 2 * batch.lengths.sum()
    assert stats.metrics["zero_advantage_rows"] == pytest.approx(4 / 12)


def test_an_update_of_truncated_rows_alone_makes_its_steps(results):
    stats = results.left_out["nothing"]
    assert (stats.applied, stats.skipped, stats.tokens) == (4, 0, 0) and stats.metrics["grad_norm"] == 0
    moved = [np.abs(results.left_out["decayed"][name] - last).max() for name, last in results.left_out["after"].items()]
    assert max(moved) > 1e-3, "momentum and weight decay act"


def test_an_update_counts_its_steps_and_tokens_and_is_made_once(results, experiences):
    stats = results.policy["stats"]
    assert (stats.step, stats.applied, stats.skipped) == (0, 4, 0) and stats.seconds > 0
    assert stats.tokens == 2 * sum(len(e.tokens) for e in experiences)
    assert {"loss", "kl_penalty", "clip_fraction", "entropy", "grad_norm", "learning_rate"} <= set(stats.metrics)
    assert results.policy["again"]


def test_logprobs_and_values_are_transformers(results, files, experiences):
    policy, classifier = load_policy(files.tied), load_classifier(files.reward)
    exact = np.concatenate([plain_logprobs(policy, e.tokens, e.offsets, e.response_mask) for e in experiences])
    assert np.abs(results.policy["logprobs"] - exact).max() < 1e-5
    assert np.abs(results.actor_critic["logprobs"] - exact).max() < 1e-5
    with torch.no_grad():
        rows = [row_values(classifier, e.row(i, "tokens")).numpy() for e in experiences for i in range(len(e))]
    mask = np.concatenate([e.response_mask for e in experiences])
    assert np.abs(results.critic["values"] - np.where(mask, np.concatenate(rows), 0)).max() < 1e-5


def test_the_critics_update_is_plain_torchs(results, files, experiences):
    batch = training_batch(experiences, False)
    expected = plain_update(load_classifier(files.reward), batch, critic_terms, algorithm())
    assert_same_update(expected, results.critic["before"], results.critic["after"])
    returns, values = batch.returns[batch.response_mask], batch.values[batch.response_mask]
    assert results.critic["stats"].metrics["explained_variance"] == pytest.approx(
        1 - (returns - values).var() / returns.var(), rel=1e-5)


def test_a_critic_of_the_policy_is_its_backbone_with_a_new_head(results, files):
    fresh, policy = results.critic["fresh"], dict(load_policy(files.tied).named_parameters())
    assert np.array_equal(fresh["model.layers.0.mlp.up_proj.weight"],
                          policy["model.layers.0.mlp.up_proj.weight"].detach().numpy())
    assert fresh["score.weight"].shape == (1, 64) and 0 < np.abs(fresh["score.weight"]).max() < 1


def test_a_critic_of_a_named_model_has_its_head_or_a_new_one(results):
    fresh, kept = results.critic["fresh_of_path"], results.critic["kept"]
    assert all(np.array_equal(fresh[name], weight) for name, weight in results.critic["fresh"].items())
    assert all(np.array_equal(kept[name], weight) for name, weight in results.critic["before"].items())


def test_a_policy_that_goes_on_from_its_checkpoint_makes_the_same_update(results):
    went_on, resumed = results.policy["ends"]
    assert all(np.array_equal(went_on[name], resumed[name]) for name in went_on)
    assert results.policy["files"] == ["average_0.pt", "rank_0.safetensors", "rng_0.pt"]


def test_what_is_exported_are_the_weights_and_their_average(results, folder):
    model, average = exported(folder / "model"), exported(folder / "average")
    after = results.policy["after"]
    assert set(model) == set(after) and all(np.array_equal(model[name], after[name]) for name in after)
    assert any(np.abs(average[name] - after[name]).max() > 1e-3 for name in after)


def test_buckets_of_a_publication_bring_every_tensor_once(results):
    names = [name for bucket in results.policy["buckets"] for name in bucket]
    assert sorted(set(names)) == sorted(results.policy["after"])
    assert len(results.policy["buckets"]) > 2 and results.policy["unchanged"] == {}


def test_adapters_are_published_alone_with_their_scale_in_b(results, folder):
    published, trained = results.adapters["alone"], load_file(folder / "adapter" / "adapter_model.safetensors")
    assert published.keys() == trained.keys()
    for name, tensor in trained.items():
        assert np.abs(tensor).max() > 0
        np.testing.assert_array_equal(published[name], 32 / 2 * tensor if "lora_B" in name else tensor)


def test_adapters_leave_the_reference_as_it_was_and_are_exported_alone_and_merged(results, files, folder):
    result = results.adapters
    assert np.abs(result["reference"] - result["first"]).max() < 1e-6
    assert np.abs(result["later"] - result["first"]).max() > 1e-3
    merged, base = exported(folder / "merged"), exported(files.tied)
    changed = [name for name in base if not np.array_equal(merged[name], base[name])]
    assert changed == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    assert result["unchanged"] == sorted(set(base) - set(changed))
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    with safe_open(folder / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "PEFT and transformers ask for it"
    assert len(adapter) == 4 and json.loads((folder / "adapter" / "adapter_config.json").read_text())["r"] == 2
    assert result["files"] == sorted(["adapters.json", "rank_0.safetensors", "rng_0.pt"])


def test_both_halves_of_an_update_of_policy_and_critic_have_their_own_metrics(results):
    policy, critic = results.actor_critic["policy"], results.actor_critic["critic"]
    assert {"clip_fraction", "approx_kl", "entropy"} <= set(policy.metrics)
    assert not [name for name in policy.metrics if name.startswith("critic/")]
    assert {"loss", "explained_variance", "grad_norm", "learning_rate"} <= set(critic.metrics)
    assert "approx_kl" not in critic.metrics and policy.metrics["loss"] != critic.metrics["loss"]
    assert policy.metrics["grad_norm"] == critic.metrics["grad_norm"]
    assert policy.applied == critic.applied == 4


def test_the_value_head_is_exported_beside_the_model(results, folder):
    saved = load_file(folder / "head.safetensors")
    assert set(saved) == {"value_head.weight"}
    assert np.array_equal(saved["value_head.weight"], results.actor_critic["head"])


@pytest.mark.parametrize("kind", ["SFTLearner", "RewardModelLearner", "ProcessRewardLearner"])
def test_supervised_updates_and_evaluations_are_plain_torchs(results, files, kind):
    result = getattr(results, kind)
    model, train, held_out, loss = {
        "SFTLearner": lambda: (load_policy(files.tied), make_sequences(1), make_sequences(2), sft_loss),
        "RewardModelLearner": lambda: (
            load_classifier(files.reward), Pairs(make_sequences(3), make_sequences(4), MARGINS),
            Pairs(make_sequences(5), make_sequences(6)), pair_loss),
        "ProcessRewardLearner": lambda: (
            load_policy(files.tied), make_step_rows(3, False), make_step_rows(4, False), step_loss),
    }[kind]()
    with torch.no_grad():
        assert result["evaluated"]["loss"] == pytest.approx(float(loss(model, held_out)), rel=1e-5)
    stage = {"SFTLearner": "sft", "RewardModelLearner": "reward-model", "ProcessRewardLearner": "process-reward"}[kind]
    assert set(result["evaluated"]) == evaluation_metrics(STAGES[stage](**MINIMAL[stage]))
    assert_same_update(plain_supervised(model, train, loss), result["before"], result["after"])
    assert [(stats.step, stats.applied, stats.skipped) for stats in result["stats"]] == [(1, 1, 0), (2, 1, 0)]
    assert all(stats.tokens == int(train.lengths.sum()) and stats.seconds > 0 for stats in result["stats"])
    assert {"loss", "grad_norm", "learning_rate"} <= set(result["stats"][0].metrics)
    assert result["without"] == {}, "without held-out rows"


def balancing(model, rows):
    """The routers' loss by transformers, of padded rows."""
    parts = [torch.from_numpy(rows.row(i, "tokens").astype(np.int64)) for i in range(len(rows))]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
    tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return model(input_ids=tokens, attention_mask=mask, output_router_logits=True).aux_loss


def test_the_routers_of_a_mixture_are_balanced(results, files):
    """The coefficient weighs transformers' loss of the mini-batch; of several micro-batches, each by its tokens."""
    result, train = results.mixture, make_sequences(1)
    assert_same_update(plain_supervised(load_policy(files.mixture), train, lambda model, rows: (
        sft_loss(model, rows) + BALANCED * balancing(model, rows))), result["before"], result["after"])
    model, several = load_policy(files.mixture), result["several"]
    with torch.no_grad():
        assert result["stats"][0].metrics["router_aux_loss"] == pytest.approx(float(balancing(model, train)), rel=1e-4)
        parts = [(float(part.lengths.sum()), float(balancing(model, part))) for part in several["parts"]]
        assert result["stats"][0].metrics["loss"] == pytest.approx(float(sft_loss(model, train)), rel=1e-5), "without"
    assert len(parts) > 1 and several["stats"][0].metrics["router_aux_loss"] == pytest.approx(
        sum(tokens * loss for tokens, loss in parts) / sum(tokens for tokens, _ in parts), rel=1e-4)


def test_a_reward_models_statistics_are_those_of_its_scores(results, files):
    model, held_out = load_classifier(files.reward), Pairs(make_sequences(5), make_sequences(6))

    def scores(side):
        with torch.no_grad():
            rows = [torch.from_numpy(side.row(i, "tokens").astype(np.int64))[None] for i in range(len(side))]
            return np.array([float(model.score(model.model(row).last_hidden_state[0, -1])) for row in rows])

    chosen, rejected = scores(held_out.chosen), scores(held_out.rejected)
    evaluated = results.RewardModelLearner["evaluated"]
    assert evaluated["accuracy"] == pytest.approx((chosen > rejected).mean())
    assert evaluated["margin"] == pytest.approx((chosen - rejected).mean(), rel=1e-4)
    assert evaluated["score"] == pytest.approx(np.concatenate([chosen, rejected]).mean(), rel=1e-4)


def test_a_process_reward_models_statistics_are_those_of_its_steps(results, files):
    model, rows = load_policy(files.tied), make_step_rows(4, False)
    good, right = [], []
    for i in range(len(rows)):
        with torch.no_grad():
            logits = model(torch.from_numpy(rows.row(i, "tokens").astype(np.int64))[None]).logits[0]
        for place in np.flatnonzero(rows.row(i, "placeholders")):
            if (label := rows.row(i, "labels")[place]) >= 0:
                good.append(float(torch.softmax(logits[place, [2, 3]], -1)[0]))
                right.append((good[-1] >= 0.5) == (label == 2))
    evaluated = results.ProcessRewardLearner["evaluated"]
    assert evaluated["accuracy"] == pytest.approx(np.mean(right))
    assert evaluated["probability"] == pytest.approx(np.mean(good), rel=1e-4)


def test_exports_of_supervised_models_load_in_transformers(results, folder):
    for kind, auto in (("SFTLearner", "AutoModelForCausalLM"), ("ProcessRewardLearner", "AutoModelForCausalLM"),
                       ("RewardModelLearner", "AutoModelForSequenceClassification")):
        found, after = exported(folder / kind, auto), getattr(results, kind)["after"]
        assert set(found) == set(after) and all(np.array_equal(found[name], after[name]) for name in after)
    steps = json.loads((folder / "ProcessRewardLearner" / "process_reward.json").read_text())
    assert steps["placeholder"] == STEPS.placeholder
