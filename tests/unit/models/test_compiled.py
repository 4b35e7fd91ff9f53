"""Compiled layers against the same layers as they are."""

import pytest
import torch

from rlhf_ray.errors import ModelError
from rlhf_ray.models.attention import register
from rlhf_ray.models.compiled import CompiledLayers, compile_layers
from rlhf_ray.models.cpu.linear import use_onednn
from rlhf_ray.models.packed_model import PackedLanguageModel, hidden_states
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


def trial(model):
    """A pass of all layers, as a learner makes it."""
    packing = Packing.of([7, 6, 5])
    hidden_states(model, torch.arange(packing.tokens), packing).sum().backward()
    model.zero_grad()


@pytest.mark.slow
def test_they_compute_the_same_and_keep_their_names(causal_lm):
    plain, compiled = causal_lm(), use_onednn(causal_lm())  # as learners load it
    assert compile_layers(compiled, lambda: trial(compiled)) == CompiledLayers(2)
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    first = passes(compiled)
    for ours, theirs in zip(first, passes(plain), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    assert all(map(torch.equal, first, passes(compiled))), "a second pass must give the same bits"


def without_layers(causal_lm):
    model = causal_lm()
    model.model.layers = torch.nn.ModuleList()
    return model


def test_a_model_without_layers_that_can_be_compiled_is_refused_if_it_must_be(causal_lm):
    with pytest.raises(ModelError, match="set it to false"):
        compile_layers(without_layers(causal_lm), lambda: None, required=True)
    assert compile_layers(without_layers(causal_lm), lambda: None).note.startswith("no layer is compiled: ")


def test_where_a_layer_is_not_one_graph_only_its_norms_and_mlps_are_compiled():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2))
    model.set_attn_implementation(register())
    found = compile_layers(model, lambda: trial(model))
    assert (found.layers, found.parts) == (1, 2) and "2 norms and MLPs of 1 layers are compiled" in found.note
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert compiled == {"model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"}
