"""Linear layers by oneDNN against torch's own."""

import copy

import pytest
import torch
from torch import nn

from rlhf_ray.models.cpu.linear import SMALLEST, OneDNNLinear, filler_of, rounded_up, use_onednn


@pytest.fixture(autouse=True)
def processor_with_avx_512(monkeypatch):
    """oneDNN computes on others, too, where it is not faster."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def layers(inputs, outputs, bias, dtype=torch.float32):
    """The same layer twice: ours and torch's."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    ours = use_onednn(nn.Sequential(copy.deepcopy(plain)))[0]
    assert type(ours) is OneDNNLinear
    return ours, plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("shape", [(1, 7), (50,), (2, 3, 5), (0,)], ids=str)
def test_outputs_and_gradients_are_torch_s(inputs, outputs, bias, shape):
    ours, plain = layers(inputs, outputs, bias)
    found = []
    for layer in (ours, plain):
        x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layer(x)
        (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
        assert y.shape == (*shape, outputs) and (not bias or layer.bias.grad is not None)
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_inputs_and_gradients_may_lie_anyhow():
    ours, plain = layers(24, 40, False)
    x = torch.randn(24, 30).t()[::2].requires_grad_()
    weights = torch.randn(40, 15).t()
    (ours(x) * weights).sum().backward()
    (plain(x.detach()) * weights).sum().backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", ["input", "weight"])
def test_only_what_is_asked_for_gets_a_gradient(trained):
    layer, _ = layers(24, 24, False)
    x = torch.randn(3, 24, requires_grad=trained == "input")
    layer.weight.requires_grad_(trained == "weight")
    layer(x).sum().backward()
    assert (x.grad is not None, layer.weight.grad is not None) == (trained == "input", trained == "weight")


def test_other_precisions_are_torch_s_to_the_bit():
    x = torch.randn(9, 24)
    ours, plain = layers(24, 40, True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16 and torch.equal(ours(x), plain(x))
    for dtype in (torch.float64, torch.bfloat16):
        ours, plain = layers(24, 40, True, dtype)
        assert torch.equal(ours(x.to(dtype)), plain(x.to(dtype)))


def test_a_model_keeps_its_parameters_and_its_smallest_layers(causal_lm):
    before = causal_lm()
    model = use_onednn(causal_lm())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in before.named_parameters()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linear) == 15 and all(type(m) is OneDNNLinear for m in linear)
    head = use_onednn(nn.Sequential(nn.Linear(64, SMALLEST - 1)))
    assert type(head[0]) is nn.Linear


def test_a_process_that_computes_on_a_gpu_keeps_torch_s_own_class(monkeypatch):
    """DeepSpeed and others look for `nn.Linear` itself, and oneDNN has nothing to do there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = use_onednn(nn.Sequential(nn.Linear(24, 40)))
    assert type(model[0]) is nn.Linear


def test_a_processor_without_avx_512_keeps_torch_s_layers_and_needs_no_filler(monkeypatch):
    assert filler_of(torch.zeros(129)) == 3
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    model = use_onednn(nn.Sequential(nn.Linear(24, 40)))
    assert type(model[0]) is nn.Linear and filler_of(torch.zeros(129)) == 0


def test_numbers_of_tokens_are_rounded_up_to_few():
    assert [rounded_up(n) for n in (0, 1, 63, 64, 65, 66, 127, 129, 1024, 1025, 1056, 1057)] == [
        0, 1, 63, 64, 66, 66, 128, 132, 1024, 1056, 1056, 1088]
    all_of_them = range(1, 4097)
    assert all(n <= rounded_up(n) <= n + n / 32 for n in all_of_them)
    assert len({rounded_up(n) for n in all_of_them}) == 64 + 6 * 32
