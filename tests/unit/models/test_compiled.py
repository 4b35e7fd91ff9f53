"""Compiled layers against the same layers as they are."""

import pytest
import torch

from rlhf_ray.errors import ModelError
from rlhf_ray.models import attention, compiled
from rlhf_ray.models.attention import register
from rlhf_ray.models.compiled import CompiledLayers, compile_layers
from rlhf_ray.models.cpu.linear import use_onednn
from rlhf_ray.models.packed_model import PackedLanguageModel, hidden_states
from rlhf_ray.models.packing import Packing
from rlhf_ray.models.parity import ParityProbe, RowLimits
from tests.tiny_families import DECODERS, config_of, randomised

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


def trial(model, fewer):
    """A pass of all layers, as a learner makes it."""
    packing = Packing.of([8, 6, 5] if fewer else [9, 8, 7, 6])
    hidden_states(model, torch.arange(packing.tokens), packing).sum().backward()
    model.zero_grad()


def model_of(family):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(family, **DECODERS[family]))
    model.set_attn_implementation(register())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_they_compute_the_same_and_keep_their_names(causal_lm, family):
    """Gemma 2 has windows and soft-caps."""
    plain, ours = (causal_lm() if family == "llama" else randomised(model_of(family)) for _ in range(2))
    use_onednn(ours)  # as learners load it
    assert compile_layers(ours, lambda fewer: trial(ours, fewer)) == CompiledLayers(2)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    first = passes(ours)
    for one, other in zip(first, passes(plain), strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)
    assert all(map(torch.equal, first, passes(ours))), "a second pass must give the same bits"


def without_layers(causal_lm):
    model = causal_lm()
    model.model.layers = torch.nn.ModuleList()
    return model


def test_a_model_without_layers_that_can_be_compiled_is_refused_if_it_must_be(causal_lm):
    with pytest.raises(ModelError, match="set it to false"):
        compile_layers(without_layers(causal_lm), lambda fewer: None, required=True)
    assert compile_layers(without_layers(causal_lm), lambda fewer: None).note.startswith("no layer is compiled: ")


def test_where_a_layer_is_not_one_graph_only_its_norms_and_mlps_are_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "compile_each", lambda modules: [
        module.compile(dynamic=True, backend="aot_eager") for module in modules])
    model = model_of("mixtral")
    found = compile_layers(model, lambda fewer: trial(model, fewer))
    assert (found.layers, found.parts) == (2, 4) and "4 norms and MLPs of 2 layers are compiled" in found.note
    assert {name for name, module in model.named_modules() if module._compiled_call_impl is not None} == {
        f"model.layers.{layer}.{norm}" for layer in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")}


def test_a_gpu_s_layers_are_one_graph_with_the_kernel_for_rows_of_any_length(monkeypatch):
    """Traced forward and backward without values, as if the CPU had the kernel; for other numbers of rows too."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._subclasses.fake_tensor import FakeTensorMode

    operators = []

    def record(graph, _):
        operators.append({str(node.target) for node in graph.graph.nodes})
        return graph

    monkeypatch.setattr(attention, "_fits_kernel", lambda query, *_: query.dtype is torch.bfloat16)
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of("llama")
        for layer in model.model.layers:
            layer.compile(dynamic=True, fullgraph=True, backend=backend)
        for lengths in ([7, 6, 5, 4], [9, 3], [31]):
            packing = Packing(torch.zeros(len(lengths), dtype=torch.int64))
            vars(packing).update(tokens=sum(lengths), longest=max(lengths), boundaries=torch.zeros(
                len(lengths) + 1, dtype=torch.int32), positions=torch.zeros(sum(lengths), dtype=torch.int64))
            with torch.autocast("cpu", torch.bfloat16):
                states = hidden_states(model, torch.zeros(sum(lengths), dtype=torch.int64), packing)
            states.sum().backward()
    forward, backward = operators
    assert "torch_attn._varlen_attn.default" in forward and "torch_attn._varlen_attn_backward.default" in backward


def test_a_compiled_layer_that_computes_something_else_is_found_when_a_learner_starts(causal_lm):
    """What is compared is compiled, and what it is compared with is not."""

    def wrong(graph, _):
        return lambda *inputs: tuple(1.1 * output for output in graph(*inputs))

    model = causal_lm()
    probe = ParityProbe(PackedLanguageModel(model), RowLimits(16, 64), "cpu", gradients=True)
    assert probe.check("the learner")["probe_difference"] < 1e-4
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend=wrong)
    with pytest.raises(ModelError, match="log-probabilities of packed rows differ"):
        probe.check("the learner")
