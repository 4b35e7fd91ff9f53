"""Logits in float32 of models that compute in bfloat16, against numpy in float64."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models import float32_head
from rlhf_ray.models.cpu.linear import use_onednn
from rlhf_ray.models.float32_head import ConvertedHead, Float32Head, use_float32_head
from rlhf_ray.models.generator_parity import TransformersReference, given_rows, logprob_gap
from rlhf_ray.models.loading import load_causal_lm
from rlhf_ray.models.lora import Adapters
from rlhf_ray.models.output_head import logits_of
from rlhf_ray.models.packed_model import Chunks, PackedLanguageModel, hidden_states
from rlhf_ray.models.parity import ParityProbe, RowLimits
from tests.models import make_tiny_llama

TOKENS, WIDTH, VOCABULARY = 7, 96, 130
PREDICTED = torch.tensor([1, 2, 4, 7, 9, 14, 16, 17])
EXACT = WIDTH * torch.finfo(torch.float32).eps
"""Relative bound of a sum of `WIDTH` products in float32, of the sum of their sizes."""


def autocast(enabled: bool = True):
    return torch.autocast("cpu", torch.bfloat16, enabled)


def float64(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def make_head(kind, dtype: torch.dtype, bias: bool = False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        states = torch.randn(TOKENS, WIDTH)
    head.__class__ = kind
    return head.to(dtype), states.to(dtype)


@pytest.mark.parametrize("kind", [Float32Head, ConvertedHead])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [True, False], ids=["float32 under autocast", "frozen in bfloat16"])
def test_logits_are_those_of_the_rounded_factors_without_another_rounding(kind, trained, bias):
    head, states = make_head(kind, torch.float32 if trained else torch.bfloat16, bias)
    with autocast(trained):
        got = head(states)
        rounded = linear(states, head.weight, head.bias)
    x, w = float64(states.bfloat16()), float64(head.weight.bfloat16())
    expected, sizes = x @ w.T, np.abs(x) @ np.abs(w).T
    if bias:
        expected = expected + float64(head.bias.bfloat16())
    assert got.dtype is torch.float32 and rounded.dtype is torch.bfloat16
    assert (np.abs(float64(got) - expected) <= EXACT * (sizes + 1)).all()
    assert np.abs(float64(rounded) - expected).max() > 1e-3


@pytest.mark.parametrize("trained", [True, False], ids=["float32 under autocast", "frozen in bfloat16"])
def test_gradients_are_those_of_the_rounded_factors(trained):
    head, states = make_head(Float32Head, torch.float32 if trained else torch.bfloat16)
    states.requires_grad_(True)
    upstream = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    with autocast(trained):
        output = head(states[None])
    output.backward(upstream[None])
    x, w, g = float64(states.bfloat16()), float64(head.weight.bfloat16()), float64(upstream)
    relative = 1e-6 if trained else torch.finfo(torch.bfloat16).eps  # a gradient has its tensor's precision
    for got, expected in ((states.grad, g @ w), (head.weight.grad, g.T @ x)):
        assert np.abs(float64(got) - expected).max() <= relative * np.abs(expected).max()


def test_frozen_weights_get_no_gradient():
    head, states = make_head(Float32Head, torch.bfloat16)
    head.requires_grad_(False)
    head(states.requires_grad_(True)).sum().backward()
    assert head.weight.grad is None and states.grad is not None


@pytest.mark.parametrize("kind", [Float32Head, ConvertedHead])
def test_a_model_in_float32_computes_as_before_bit_for_bit(kind, causal_lm):
    states = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(0))
    before, changed = causal_lm(), causal_lm()
    if kind is Float32Head:
        use_onednn(before)
    use_float32_head(changed, kind)
    assert torch.equal(logits_of(before, states), logits_of(changed, states))


def oracle(model, tokens, packing, predicted, temperature=1.0, added=0.0):
    """[n] log-probabilities in numpy, of the model's own hidden states; `added` to its head's weight."""
    hidden = hidden_states(model, tokens, packing)[predicted - 1]
    weight = float64(model.get_output_embeddings().weight.bfloat16()) + added
    logits = float64(hidden.bfloat16()) @ weight.T / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logprobs[np.arange(len(predicted)), tokens[predicted].numpy()]


@pytest.mark.parametrize("chunks", [Chunks(), Chunks(3 * 48)], ids=["one piece", "chunks"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("trained", [True, False], ids=["float32 under autocast", "frozen in bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_a_model_in_bfloat16(causal_lm, tokens, packing, trained, tied, chunks, temperature):
    model = causal_lm(tied, dtype=torch.float32 if trained else torch.bfloat16)
    packed = PackedLanguageModel(model, temperature, chunks)
    with autocast(trained):
        without = packed(tokens, packing, PREDICTED)[0]
        use_float32_head(model)
        got = packed(tokens, packing, PREDICTED)[0]
        expected = oracle(model, tokens, packing, PREDICTED, temperature)
    assert np.abs(float64(got) - expected).max() < 3e-6
    assert np.abs(float64(without) - expected).max() > 3e-4  # 1e-3 where a CPU has no products in bfloat16


def test_an_adapter_on_the_head_is_added_in_float32_and_the_frozen_base_is_without(causal_lm, tokens, packing):
    model = causal_lm(False, dtype=torch.bfloat16)
    use_float32_head(model)
    packed = PackedLanguageModel(model)
    alone = packed(tokens, packing, PREDICTED)[0].detach()
    adapters = Adapters(model, LoRAConfig(rank=4, alpha=8, targets=["lm_head", "q_proj"]), "m")
    a, b = (factor["default"].weight for factor in (model.lm_head.lora_A, model.lm_head.lora_B))
    nn.init.normal_(b, std=0.1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        adapted = packed(tokens, packing, PREDICTED)[0]
        with adapters.disabled():
            assert torch.equal(packed(tokens, packing, PREDICTED)[0], alone)
    expected = oracle(model, tokens, packing, PREDICTED, added=8 / 4 * float64(b) @ float64(a))
    assert np.abs(float64(adapted) - expected).max() < 3e-6
    assert np.abs(float64(alone) - expected).max() > 0.01


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_the_comparison_at_the_start_sees_what_the_head_computes(causal_lm, monkeypatch, factor):
    """By its definition, with gradients: a product that is 5 % too large is found."""
    right = float32_head._product
    monkeypatch.setattr(float32_head, "_product", lambda a, b: factor * right(a, b))
    model = causal_lm(False, dtype=torch.bfloat16)
    use_float32_head(model)
    probe = ParityProbe(PackedLanguageModel(model), RowLimits(40, 64), "cpu", gradients=True)
    if factor == 1.0:
        assert probe.check("learner")["probe_difference"] < 0.05
        assert type(model.lm_head) is Float32Head, "restored"
    else:
        with pytest.raises(ModelError, match="differ"):
            probe.check("learner")


def test_a_loaded_model_has_it_where_the_configuration_says_so(tmp_path):
    folder = str(make_tiny_llama(tmp_path / "m", vocab=64))
    with_head, without = (load_causal_lm(ModelConfig(path=folder, dtype="bfloat16", float32_head=asked))
                          for asked in (True, False))
    assert type(with_head.lm_head) is Float32Head and type(without.lm_head) is not Float32Head
    assert with_head.lm_head.weight is with_head.model.embed_tokens.weight, "still tied"


def test_the_reference_of_commands_without_a_learner_has_it_too(tmp_path):
    folder = str(make_tiny_llama(tmp_path / "m", vocab=64))
    rows, by_head = None, {}
    for asked in (True, False):
        reference = TransformersReference(ModelConfig(path=folder, dtype="bfloat16", float32_head=asked))
        rows = rows or given_rows(reference.model.config, 31)
        by_head[asked] = reference.logprobs(rows)
    model = load_causal_lm(ModelConfig(path=folder, dtype="bfloat16", float32_head=True))
    model.set_attn_implementation("eager")
    expected = TransformersReference.__new__(TransformersReference)
    expected.model = model.eval()
    assert logprob_gap(by_head[True], expected.logprobs(rows)) < 1e-5
    assert logprob_gap(by_head[False], by_head[True]) > 1e-4


def test_a_head_that_is_not_linear_is_refused(causal_lm):
    model = causal_lm(False)
    model.lm_head = nn.Identity()
    with pytest.raises(ModelError, match=r"model.float32_head=true .* LlamaForCausalLM is Identity; leave it false"):
        use_float32_head(model)
