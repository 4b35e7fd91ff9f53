"""Compiled layers against the same layers as they are."""

import pytest
import torch

from rlhf_ray.errors import ModelError
from rlhf_ray.models.compiled import compile_layers
from rlhf_ray.models.cpu.linear import use_onednn
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.packing import Packing

LENGTHS = [[5, 1, 9, 3], [7, 2, 6], [12]]


def passes(model):
    """Log-probabilities and gradients of packed passes of several sizes."""
    packed, found = PackedLanguageModel(model, 0.9), []
    for lengths in LENGTHS:
        packing = Packing.of(lengths)
        tokens = torch.randint(0, 48, (packing.tokens,), generator=torch.Generator().manual_seed(0))
        logprobs, _ = packed(tokens, packing, packing.positions.nonzero()[:, 0])
        logprobs.sum().backward()
        found += [logprobs.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found


@pytest.mark.slow
def test_they_compute_the_same_and_keep_their_names(causal_lm):
    plain, compiled = causal_lm(), use_onednn(causal_lm())  # as learners load it
    assert compile_layers(compiled) == 2 * 3  # two norms and an MLP in each layer
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    first = passes(compiled)
    for ours, theirs in zip(first, passes(plain), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    assert all(map(torch.equal, first, passes(compiled))), "a second pass must give the same bits"


def test_a_model_without_layers_that_can_be_compiled_is_refused(causal_lm):
    model = causal_lm()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ModelError, match="set it to false"):
        compile_layers(model)


def test_experts_and_attention_stay_as_they_are():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2))
    assert compile_layers(model) == 2
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert compiled == {"model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"}
