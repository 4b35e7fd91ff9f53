"""Adapters on real DeepSpeed ranks, compared with peft and plain torch: one row after another, one AdamW, no engine."""

import numpy as np
import pytest
import torch

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.learner import LearnerConfig, LoRAConfig, PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import CriticConfig
from rlhf_ray.data.supervised_records import Pairs
from rlhf_ray.engine.training_state import TrainingState
from rlhf_ray.errors import CheckpointError
from rlhf_ray.records import TokenScores
from rlhf_ray.roles.ppo_update import training_batch
from rlhf_ray.weights.manifest import unpack, verified_tensors
from tests.cluster.learners.plain_torch import (
    LARGE,
    OPTIMIZER,
    SEED,
    SMALL,
    TEMPERATURE,
    algorithm,
    assert_same_update,
    critic_terms,
    load_classifier,
    load_policy,
    make_experiences,
    make_rollout,
    make_sequences,
    numbers,
    pair_loss,
    plain_adamw,
    plain_logprobs,
    plain_step,
    plain_update,
    policy_terms,
)

pytestmark = pytest.mark.cluster
LORA = LoRAConfig(rank=4, alpha=16)
MARKS = (".lora_A.default.weight", ".lora_B.default.weight")
CUTS = [(1, 1, LARGE, False), (2, 0, SMALL, True), (2, 2, SMALL, False), (2, 3, SMALL, True)]
CARD = ModelCardInfo(stage="ppo", step=1, base_model="base", trained_on="random tokens")


@pytest.fixture(scope="module")
def experiences(files):
    return make_experiences(files)


def policy_arguments(path, zero=1, budget=LARGE, checkpointing=False, dtype="float32", lora=LORA, ema=None):
    config = PolicyConfig(zero_stage=zero, micro_batch_tokens=budget, gradient_checkpointing=checkpointing,
                          optimizer=OPTIMIZER, lora=lora, ema_decay=ema)
    return {"config": config, "model": ModelConfig(path=str(path), dtype=dtype), "seed": SEED, "total_steps": 100,
            "algorithm": algorithm(), "temperature": TEMPERATURE}


def critic_arguments(files, zero, budget, checkpointing=False):
    config = CriticConfig(zero_stage=zero, micro_batch_tokens=budget, gradient_checkpointing=checkpointing,
                          optimizer=OPTIMIZER, init="reward", lora=LORA)
    return {"config": config, "model": ModelConfig(path=str(files.reward)), "seed": SEED, "total_steps": 100,
            "algorithm": algorithm()}


def reward_model_arguments(files, zero, budget):
    config = LearnerConfig(zero_stage=zero, micro_batch_tokens=budget, optimizer=OPTIMIZER, lora=LORA)
    return {"config": config, "model": ModelConfig(path=str(files.reward)), "seed": SEED, "total_steps": 100,
            "batch_size": 9}


def adapted(model, weights):
    """The model with peft's own adapters in it, all its weights as given."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=16, target_modules=layers), model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name].copy()))
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    return model


def trained(weights):
    """Adapters and heads among the parameters."""
    return {name: w for name, w in weights.items() if name.endswith(MARKS) or name == "score.weight"}


def assert_adapters_learned(expected, before, after):
    """The adapters' update is the expected one; everything else is as it was, bit for bit."""
    assert_same_update(tuple(map(trained, expected)), trained(before), trained(after))
    assert len(trained(after)) > 6
    assert all(np.array_equal(before[name], after[name]) for name in before.keys() - trained(before).keys())


@pytest.mark.parametrize(("world", "zero", "budget", "checkpointing"), CUTS)
def test_the_policy_s_adapters_learn_as_in_plain_torch(ranks, files, experiences, world, zero, budget, checkpointing):
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files.tied, zero, budget, checkpointing))
    before = learners.weights()
    assert all((before[name] == 0).all() for name in before if name.endswith(MARKS[1])), "no effect at first"
    learners.do("update", 0, 0.0, *experiences)
    batch, plain = training_batch(experiences, True), adapted(load_policy(files.tied), before)
    assert_adapters_learned(plain_update(plain, batch, policy_terms, algorithm()), before, learners.weights())


@pytest.mark.parametrize(("world", "zero", "budget", "checkpointing"), CUTS[1::2])
def test_the_critic_s_adapters_and_its_whole_head_learn(
    ranks, files, experiences, world, zero, budget, checkpointing
):
    learners = ranks.make(world, "CriticLearner", critic_arguments(files, zero, budget, checkpointing))
    before = learners.weights()
    learners.do("update", 0, *experiences)
    batch, plain = training_batch(experiences, False), adapted(load_classifier(files.reward), before)
    assert_adapters_learned(plain_update(plain, batch, critic_terms, algorithm()), before, learners.weights())


def test_the_reward_model_s_adapters_and_its_whole_head_learn(ranks, files, tmp_path):
    train = Pairs(make_sequences(3), make_sequences(4))
    learners = ranks.make(2, "RewardModelLearner", reward_model_arguments(files, 2, SMALL))
    before = learners.weights()
    learners.do("take", train, train)
    for step in (1, 2):
        learners.do("update", step)
    model = adapted(load_classifier(files.reward), before)
    first, optimizer = numbers(model), plain_adamw(model)
    for _ in range(2):
        plain_step(model, optimizer, pair_loss(model, train), OPTIMIZER.grad_clip)
    assert_adapters_learned((first, numbers(model)), before, learners.weights())
    assert_exports_agree(learners, tmp_path, files.reward, "AutoModelForSequenceClassification", num_labels=1)


@pytest.mark.parametrize(("world", "zero"), [(1, 1), (2, 3)])
def test_the_frozen_base_is_the_reference(ranks, files, experiences, world, zero):
    rollout, expected_base = make_rollout(experiences[1]), load_policy(files.tied)
    learners = ranks.make(world, "PolicyLearner", policy_arguments(files.tied, zero, SMALL))
    at_first = TokenScores.concat(learners.do("logprobs", rollout))
    learners.do("update", 0, 0.0, *experiences)
    learned = learners.weights()
    reference = TokenScores.concat(learners.do("reference_logprobs", rollout))
    policy = TokenScores.concat(learners.do("logprobs", rollout))
    columns = rollout.tokens, rollout.offsets, rollout.response_mask
    assert np.abs(reference.values - plain_logprobs(expected_base, *columns)).max() < 1e-5
    assert np.array_equal(reference.values, at_first.values), "in the same packed forward pass"
    expected = plain_logprobs(adapted(load_policy(files.tied), learned), *columns)
    assert np.abs(policy.values - expected).max() < 1e-5 and np.abs(policy.values - reference.values).max() > 0.01


@pytest.mark.parametrize("zero", [2, 3])
def test_asking_for_the_reference_changes_nothing_about_training(ranks, files, experiences, zero):
    ends = []
    for asks in (False, True):
        learners = ranks.make(2, "PolicyLearner", policy_arguments(files.tied, zero, SMALL))
        learners.do("update", 0, 0.0, *experiences)
        if asks:
            learners.do("reference_logprobs", make_rollout(experiences[0]))
        learners.do("update", 1, 0.0, *experiences)
        ends.append(learners.weights())
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(("kind", "zero"), [("tied", 1), ("policy", 3)])
def test_what_is_published_is_the_merged_model_under_the_base_s_names(ranks, files, experiences, kind, zero):
    path = getattr(files, kind)
    learners = ranks.make(2, "PolicyLearner", policy_arguments(path, zero, SMALL))
    learners.do("update", 0, 0.0, *experiences)
    before = learners.weights()
    count = learners.do("plan_weights", 1 << 14, [])[0].whole.buckets
    assert count > 2
    found = {}
    for index in range(count):
        bucket = learners.do("weight_bucket", 1, index)[0]
        found.update({name: t.clone() for name, t in unpack(verified_tensors(bucket))})
    base = dict(load_policy(path).named_parameters())
    assert list(found) == list(base)
    merged = peft_s_merge(adapted(load_policy(path), before))
    for name, tensor in found.items():
        assert (tensor - merged[name]).abs().max() < 1e-6, name
    assert max(float((found[name] - base[name]).detach().abs().max()) for name in base) > 0.01
    assert all(np.array_equal(before[name], w) for name, w in learners.weights().items()), "training goes on as it was"


def peft_s_merge(model):
    """Weights of the base model after peft has merged its adapters into them."""
    from peft.tuners.lora import LoraLayer

    for layer in [m for m in model.modules() if isinstance(m, LoraLayer)]:
        layer.merge()
    return {name.replace(".base_layer.", "."): p.detach() for name, p in model.named_parameters() if "lora" not in name}


@pytest.mark.parametrize(("zero", "compiled"), [(0, False), (2, False), (3, False), (0, True)])
def test_after_save_and_load_in_new_processes_the_next_update_is_the_same_bit_for_bit(
    ranks, fresh_ranks, files, experiences, tmp_path, zero, compiled
):
    arguments = policy_arguments(files.tied, zero, SMALL, lora=LoRAConfig(rank=4, alpha=16, dropout=0.3))
    arguments["config"] = arguments["config"].model_copy(update={"compile_layers": compiled})
    learners = ranks.make(2, "PolicyLearner", arguments)
    assert ("as a whole" in learners.compiled) is compiled
    learners.do("update", 0, 0.0, *experiences)
    learners.save(tmp_path)
    assert_no_base_in(tmp_path)
    saved = learners.weights()
    uninterrupted = learners.do("update", 1, 0.0, *experiences)
    others = fresh_ranks.make(2, "PolicyLearner", arguments)
    others.do("load", str(tmp_path))
    assert all(np.array_equal(others.weights()[name], saved[name]) for name in saved)
    resumed = others.do("update", 1, 0.0, *experiences)
    ends = learners.weights(), others.weights()
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in saved)
    assert all(np.abs(ends[0][name] - saved[name]).max() > 0 for name in trained(saved))
    assert resumed[0].metrics == uninterrupted[0].metrics


def assert_no_base_in(directory):
    names = TrainingState(directory).names()
    assert names and all(name.endswith(MARKS) for name in names)


def test_a_checkpoint_of_other_adapters_is_refused(ranks, files, experiences, tmp_path):
    ranks.make(1, "PolicyLearner", policy_arguments(files.tied)).save(tmp_path / "adapters")
    ranks.make(1, "PolicyLearner", policy_arguments(files.tied, lora=None)).save(tmp_path / "whole")
    others = {
        "adapters of another base model": policy_arguments(files.policy),
        "of another shape: alpha was 16 and is 8": policy_arguments(files.tied, lora=LoRAConfig(rank=4, alpha=8)),
        "written with adapters, but the configuration has no `lora`": policy_arguments(files.tied, lora=None),
    }
    for said, arguments in others.items():
        with pytest.raises(CheckpointError, match=said):
            ranks.make(1, "PolicyLearner", arguments).do("load", str(tmp_path / "adapters"))
    with pytest.raises(CheckpointError, match="written without adapters"):
        ranks.make(1, "PolicyLearner", policy_arguments(files.tied)).do("load", str(tmp_path / "whole"))


@pytest.mark.parametrize("zero", [2, 3])
def test_a_base_in_bfloat16_stays_so_and_adapters_learn_in_float32(ranks, files, experiences, zero):
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files.tied, zero, SMALL, dtype="bfloat16"))
    before = learners.weights()
    learners.do("update", 0, 0.0, *experiences)
    after = learners.weights()
    for name in before:
        assert np.isfinite(after[name]).all()
        assert np.array_equal(after[name], before[name]) == (name not in trained(before)), name
    assert any(not np.array_equal(w, bfloat16(w)) for w in trained(after).values())
    learners.do("plan_weights", 1 << 20, [])
    assert {entry.dtype for entry in learners.do("weight_bucket", 1, 0)[0].entries} == {"bfloat16"}


def bfloat16(weights):
    return torch.from_numpy(weights).bfloat16().float().numpy()


def test_the_merged_model_and_the_adapters_alone_say_the_same(ranks, files, experiences, tmp_path):
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files.policy, 3, SMALL))
    learners.do("update", 0, 0.0, *experiences)
    assert_exports_agree(learners, tmp_path, files.policy, "AutoModelForCausalLM")


def assert_exports_agree(learners, directory, base, auto, **options):
    import transformers
    from peft import PeftModel

    learners.do("export", str(directory / "model"), CARD)
    learners.do("export_adapter", str(directory / "adapter"), CARD)
    load = getattr(transformers, auto).from_pretrained
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        plain = load(base, **options)
        at_first = plain(tokens).logits
        merged = load(directory / "model")(tokens).logits
        attached = PeftModel.from_pretrained(plain, str(directory / "adapter")).eval()(tokens).logits
    assert (merged - attached).abs().max() < 1e-5 and (merged - at_first).abs().max() > 0.01


@pytest.mark.parametrize("zero", [3])
def test_the_average_is_that_of_the_adapters_and_exported_merged(ranks, files, experiences, tmp_path, zero):
    learners = ranks.make(2, "PolicyLearner", policy_arguments(files.tied, zero, SMALL, ema=0.5))
    before = learners.weights()
    learners.do("update", 0, 0.0, *experiences)
    average = {name: w for name, w in learners.weights("average").items() if name in trained(before)}
    assert not any(np.array_equal(w, learners.weights()[name]) for name, w in average.items())
    learners.do("export_average", str(tmp_path / "average"), CARD)
    found = dict(load_policy(tmp_path / "average").named_parameters())
    expected = peft_s_merge(adapted(load_policy(files.tied), {**before, **average}))
    assert list(found) == [name for name, _ in load_policy(files.tied).named_parameters()]
    assert all((found[name] - expected[name]).abs().max() < 1e-6 for name in found)
