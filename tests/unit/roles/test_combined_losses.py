"""Losses that are sums: policy, KL, entropy, value and pretraining text, with all their weights, in float64.

The learners are the real ones; only DeepSpeed is left out, whose place a plain module takes.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhf_ray.config.algorithm import AlgorithmConfig, PtxConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.supervised_records import Sequences
from rlhf_ray.engine.deepspeed_engine import StepResult
from rlhf_ray.models.attention import register
from rlhf_ray.models.packed_model import PackedActorCritic, PackedLanguageModel
from rlhf_ray.records import Batch, offsets_of
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.micro_batch import AverageMeter, MicroBatch
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.ppo_update import Update
from tests.unit.roles.conftest import VOCABULARY

TEXT = PtxConfig(path="unused", batch_size=3, coef=0.7)
SEQUENCE = {"loss": {"ratio": "sequence"}, "aggregate": "sequence", "importance": {"tokens": "none"}}
EVERYTHING = {"kl": {"placement": "loss", "estimator": "k3"}, "entropy_coef": 0.2, "importance": {"tokens": "truncate"}}
KL_COEF, VALUE_COEF = 0.3, 0.4


def sequences(seed=4, rows=5):
    """Random text; every token carries loss."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 7, rows)
    tokens = rng.integers(2, VOCABULARY, lengths.sum()).astype(np.int32)
    return Sequences(offsets_of(lengths), tokens, np.ones(len(tokens), dtype=bool))


def batch(seed=0, rows=5, gap=True):
    """Random experience; the longest row has two tokens inside its response that the policy did not sample."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 4, rows), rng.integers(1, 6, rows)
    responses[1] = 6
    offsets = offsets_of(prompts + responses)
    mask = np.concatenate([np.repeat([False, True], [p, r]) for p, r in zip(prompts, responses, strict=True)])
    if gap:
        mask[offsets[2] - 4 : offsets[2] - 2] = False

    def column(scale, middle=0.0):
        return np.where(mask, middle + scale * rng.standard_normal(len(mask)), 0).astype(np.float32)

    old = column(0.3, -3.7)
    return Batch(offsets, rng.integers(2, VOCABULARY, len(mask)).astype(np.int32), mask, old + column(0.1), old,
                 old + column(0.1), column(1), column(1), column(1))


def tiny_model():
    """A Llama that is float64 throughout: transformers' norms compute in float32, and differences would see it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.3, pad_token_id=0,
        ))
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)
    model.model.norm = torch.nn.RMSNorm(8)
    model.set_attn_implementation(register())
    return model


@pytest.fixture(scope="module")
def modules():
    """The policy alone, and policy and critic in one, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return {PolicyLearner: PackedLanguageModel(tiny_model(), 0.9).double(),
                ActorCriticLearner: PackedActorCritic(tiny_model(), 0.9).double()}


def learner(cls, module, text=None, rank=0, world=1, budget=1000, **algorithm):
    """A learner on a plain module."""
    made = cls(PolicyConfig(micro_batch_tokens=budget), ModelConfig(path="unused"), rank, world, 3, 1,
               AlgorithmConfig(value_coef=VALUE_COEF, **algorithm), 0.9)
    made.engine = SimpleNamespace(device="cpu", forward=module, infer=module)
    if text is not None:
        made.take_pretraining_text(TEXT, text)
    return made


def total(made, part, meter=None):
    """The loss of one optimizer step, as this rank adds it up."""
    losses = []
    made.engine.backward = losses.append
    made.engine.step = lambda: StepResult(applied=True, grad_norm=1.0, learning_rate=0.1)
    assert made.optimize(part, made.chosen_rows(part), Update(KL_COEF), meter or AverageMeter()) is not None
    return sum(losses)


def slope(module, loss, directions):
    """(derivative of the loss along the directions by autograd, by central differences)."""
    module.zero_grad()
    loss().backward()
    exact = sum(float((p.grad * d).sum()) for p, d in zip(module.parameters(), directions, strict=True)
                if p.grad is not None)
    values, size = [], 1e-6
    for step in (size, -2 * size, size):
        with torch.no_grad():
            for p, d in zip(module.parameters(), directions, strict=True):
                p += step * d
            values.append(float(loss()))
    return exact, (values[0] - values[1]) / (2 * size)


@pytest.mark.parametrize("cls", [PolicyLearner, ActorCriticLearner])
@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("changes", [
    {}, {"aggregate": "sequence"}, SEQUENCE, EVERYTHING, {"kl": {"placement": "loss", "unbiased": False}},
    {**EVERYTHING, "aggregate": "sequence"}], ids=str)
def test_gradient_check_of_the_whole_objective(modules, cls, with_text, changes):
    module, part = modules[cls], batch()
    if "loss" in changes:  # one ratio a row has this gradient where the row has one advantage (`policy_ratios`)
        part = replace(part, advantages=np.repeat(part.advantages[part.offsets[1:] - 1], part.lengths))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in module.parameters()]

        def loss():  # every evaluation from the first row of the text on
            return total(learner(cls, module, sequences() if with_text else None, budget=16, **changes), part)

        exact, measured = slope(module, loss, directions)
        assert exact == pytest.approx(measured, rel=1e-5, abs=1e-8)
        assert abs(exact) > 1e-3


def test_the_text_s_loss_is_added_with_its_coefficient(modules):
    module, text = modules[PolicyLearner], sequences()
    alone = total(learner(PolicyLearner, module), batch())
    meter = AverageMeter()
    both = total(learner(PolicyLearner, module, text), batch(), meter)
    rows = learner(PolicyLearner, module, text).ptx.next_rows()
    losses = []
    for i in range(len(rows)):  # transformers' own logits, row by row, at temperature 1
        tokens = torch.from_numpy(rows.row(i, "tokens").astype(np.int64))
        module.model.set_attn_implementation("sdpa")
        every = module.model(tokens[None]).logits[0, :-1].log_softmax(-1)
        module.model.set_attn_implementation(register())
        losses.append(-every.gather(1, tokens[1:, None])[:, 0])
    expected = torch.cat(losses).mean().detach()
    assert float((both - alone).detach()) == pytest.approx(0.7 * float(expected), abs=1e-9)
    assert meter.means()["ptx_loss"] == pytest.approx(float(expected), abs=1e-9)


def test_with_a_coefficient_of_zero_the_text_s_loss_is_only_measured(modules):
    made, meter = learner(PolicyLearner, modules[PolicyLearner]), AverageMeter()
    alone = total(learner(PolicyLearner, modules[PolicyLearner]), batch())
    made.take_pretraining_text(TEXT.model_copy(update={"coef": 0.0}), sequences())
    assert total(made, batch(), meter) == alone and meter.means()["ptx_loss"] > 0


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_the_critic_s_loss_is_added_with_its_coefficient_and_averaged_as_the_policy_s_is(modules, aggregate):
    module, part, meter = modules[ActorCriticLearner], batch(), AverageMeter()
    both = total(learner(ActorCriticLearner, module, aggregate=aggregate), part, meter)
    alone = learner(PolicyLearner, lambda *args, mask: module(*args, mask=mask)[:2], aggregate=aggregate)
    policy = total(alone, part).detach()
    micro = MicroBatch(part, "cpu")
    values = module(micro.tokens, micro.packing, micro.predicted)[2].detach().numpy()
    mask = part.response_mask
    near = np.clip(values, part.values[mask] - 0.2, part.values[mask] + 0.2)
    worst = np.maximum((values - part.returns[mask]) ** 2, (near - part.returns[mask]) ** 2)
    rows = np.repeat(np.arange(len(part)), part.lengths)[mask]
    expected = 0.5 * (worst.mean() if aggregate == "token" else np.mean([worst[rows == r].mean() for r in set(rows)]))
    assert float((both - policy).detach()) == pytest.approx(VALUE_COEF * expected, rel=1e-6)
    assert meter.means()["critic/loss"] == pytest.approx(expected, rel=1e-6)
    assert meter.means()["loss"] == pytest.approx(float(policy), rel=1e-6)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**16), rows=st.integers(3, 6), world=st.integers(1, 4), budget=st.sampled_from([12, 1000]),
       aggregate=st.sampled_from(["token", "sequence"]), cls=st.sampled_from([PolicyLearner, ActorCriticLearner]))
@example(seed=0, rows=3, world=4, budget=1000, aggregate="token", cls=PolicyLearner)
def test_ranks_and_cuts_change_nothing(modules, seed, rows, world, budget, aggregate, cls):
    """More ranks than rows, even: some ranks then only keep the others company."""
    changes = {**EVERYTHING, "aggregate": aggregate}
    part, text, module = batch(seed, rows), sequences(seed, rows=2), modules[cls]
    one, all_ranks = AverageMeter(), AverageMeter()
    whole = total(learner(cls, module, text, **changes), part, one)
    shares = [total(learner(cls, module, text, rank, world, budget, **changes), part, all_ranks)
              for rank in range(world)]
    assert float(sum(shares).detach()) == pytest.approx(float(whole.detach()), rel=1e-9, abs=1e-12)
    assert all_ranks.means() == pytest.approx(one.means(), rel=1e-6, abs=1e-9)  # some are float32


@pytest.mark.parametrize("cls", [PolicyLearner, ActorCriticLearner])
@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_what_stands_in_a_gap_has_no_effect_but_as_context(modules, cls, aggregate):
    part = batch()
    outside = ~part.response_mask
    names = ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "values", "advantages", "returns")
    spoilt = replace(part, **{
        name: np.where(outside, np.float32(np.nan), getattr(part, name)) for name in names})
    changes = {**EVERYTHING, "aggregate": aggregate}
    one, two = (total(learner(cls, modules[cls], **changes), p) for p in (part, spoilt))
    assert float(one) == float(two) and np.isfinite(float(one))
    counted = learner(cls, modules[cls], **changes)
    assert counted.loss(part, Update()).tokens == part.response_mask.sum()
