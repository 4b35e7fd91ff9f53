"""Whole decoder layers of every family of docs/models.md, traced forward and backward: as few graphs as there are kinds
of layers, none for batches of another shape, and what they compute is what the layers compute as they are.

The graphs are those of torch.compile, with its decompositions, without code generated from them; `unit/models/
test_compiled.py` compares generated code.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.internals.torch import uncompiled
from rlhf_ray.models import compiled
from rlhf_ray.models.attention import register
from rlhf_ray.models.lora import Adapters
from rlhf_ray.models.model_families import why_padded
from rlhf_ray.models.packed_model import hidden_states
from rlhf_ray.models.packing import Packing
from tests.threads import one_torch_thread
from tests.tiny_families import DECODERS, config_of, randomised

pytestmark = pytest.mark.slow

TRIED = [9, 8, 7, 6, 5]
BATCHES = [[5, 1, 9, 3], [7, 2, 6], [12, 12], [20, 3, 4, 5, 6, 30], [31], [4] * 6, [2] * 40, [30] * 20, [3, 9],
           [8, 7, 6, 5]]
"""Among them one row alone, rows of one length, rows longer than windows, and more tokens than a block has."""
PARTS = {"deepseek_v3", "gpt_oss", "granitemoehybrid", "jamba", "minimax", "mixtral", "nemotron_h", "qwen2_moe",
         "qwen3_moe", "qwen3_next",  # experts: on CPUs transformers reads how many tokens each gets
         "mamba", "olmo_hybrid", "recurrent_gemma"}  # loops over tokens
"""Families whose layers are no single graphs on CPUs."""
BOUND = 0.01
"""Largest difference of norms, relative, under autocast. Almost all families have the same bits."""
DROPPED = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")
VARIED = ("bloom", "gemma2", "gpt2", "llama", "phi3", "qwen2")
"""Families that are also traced with dropout and adapters: each of windows, soft-caps, transposed and fused layers, and
padded rows."""


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Layers are traced and run by torch's own kernels; nothing is left of earlier tests."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "compile_each", lambda modules: [
        module.compile(dynamic=True, backend="aot_eager") for module in modules])
    with one_torch_thread():
        yield
    torch._dynamo.reset()


def model_of(family, **entries):
    from transformers import AutoModelForCausalLM

    config = config_of(family, **DECODERS[family])
    for name, value in entries.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if not why_padded(config):
        model.set_attn_implementation(register())
    return randomised(model).train()


def passed(model, lengths, gradients=True):
    """Hidden states under autocast, and gradients of an uneven sum of them."""
    packing = Packing.of(lengths)
    tokens = torch.randint(2, 64, (packing.tokens,), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
        states = hidden_states(model, tokens, packing)
    if not gradients:
        return [states]
    weights = torch.linspace(-1, 1, states.numel()).view(states.shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((states.float() * weights).sum(), trained, allow_unused=True)
    return [states.detach(), *(gradient for gradient in found if gradient is not None)]


def tried(model, fewer):
    """As a learner's first passes."""
    for gradients in (True, False):
        passed(model, TRIED[fewer:], gradients)


def graphs():
    return counters["stats"]["unique_graphs"]


def new_graphs(run):
    """Numbers of graphs that the passes over each of the batches add."""
    found = []
    for lengths in BATCHES:
        before = graphs()
        run(lengths)
        found.append(graphs() - before)
    return found


def without_dropout(family):
    return model_of(family, **dict.fromkeys(DROPPED, 0.0))


def assert_no_more_graphs(model, gradients, first):
    """No batch adds a graph. Padded batches of one row, and of rows of one length, are ways of computing of their own,
    for each of two kinds of layers, and have been seen after the first of each."""
    found = new_graphs(lambda lengths: passed(model, lengths, gradients))
    if why_padded(model.config):
        first += 4
        assert sum(found) <= first, found
        found, first = new_graphs(lambda lengths: passed(model, lengths, gradients)), 0
    assert sum(found[:1]) <= first and not any(found[1:]), found


def assert_the_same(model, lengths):
    ours = passed(model, lengths)
    with uncompiled(model):
        theirs = passed(model, lengths)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one.float() - other.float()).norm()) <= BOUND * float(other.float().norm())


@pytest.mark.parametrize("family", DECODERS)
def test_the_layers_of_every_family_are_graphs_that_fit_all_batches(family):
    model, before = without_dropout(family), graphs()
    found = compiled.compile_layers(model, partial(tried, model))
    assert found.layers and (not found.parts) == (family not in PARTS), found.note
    if not found.parts:
        assert graphs() - before <= 2 * 2, "two ways of computing, and at most two kinds of layers"
    for gradients in (True, False):
        assert_no_more_graphs(model, gradients, 0)
    for lengths in BATCHES[:4]:
        assert_the_same(model, lengths)


@pytest.mark.parametrize("family", VARIED)
def test_with_adapters_and_dropout_there_are_no_more_than_two_graphs_for_each_way_of_computing(family):
    model = model_of(family, **dict.fromkeys(DROPPED, 0.1))
    adapters = Adapters(model, LoRAConfig(rank=2, dropout=0.1), "", True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    before = graphs()
    note = compiled.compile_layers(model, lambda fewer: passed(model, TRIED[fewer:])).note
    assert "as a whole" in note and graphs() - before <= 4, "the first layer's input has no gradient"
    assert_no_more_graphs(model, True, 0)
    one, other = passed(model, TRIED), passed(model, TRIED)
    assert not torch.equal(one[0], other[0]), "something is dropped"
    model.eval()
    assert_no_more_graphs(model, False, 2)
    with adapters.disabled():
        assert_no_more_graphs(model, False, 2)
    assert_no_more_graphs(model, True, 4)
    for lengths in BATCHES[:4]:
        assert_the_same(model, lengths)
