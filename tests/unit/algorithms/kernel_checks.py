"""The Triton kernels compute what the passes on CPUs do. They run in Triton's interpreter, which must be on before
anything imports Triton: `test_logprobs_on_gpu` runs these checks in a process of their own."""

import pytest
import torch

from rlhf_ray.algorithms import logprobs as module
from rlhf_ray.algorithms import logprobs_on_gpu
from rlhf_ray.algorithms.logprobs import entropy, token_logprobs

WIDTH, ROWS = 150, 4
INF = float("inf")
TOKENS = torch.tensor([0, 149, 70, 64])
GIVEN = torch.tensor([1.0, -2.0, 0.5, 1.5])


@pytest.fixture
def kernels(monkeypatch):
    """All rows but those in float64 go through the kernels, in blocks that do not divide them."""
    monkeypatch.setattr(logprobs_on_gpu, "BLOCK", 64)
    monkeypatch.setattr(module, "_kernels", lambda logits: None if logits.dtype is torch.float64 else logprobs_on_gpu)


def random_logits(dtype=torch.float32):
    logits = 3 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = -INF
    logits[2, :65] = -INF  # its first block and the beginning of its second
    return logits.to(dtype)


def answers(function, logits):
    """Values and gradients."""
    leaf = logits.clone().requires_grad_()
    values = function(leaf)
    return values.detach(), torch.autograd.grad(values, leaf, GIVEN.to(values.dtype))[0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [lambda z, t: token_logprobs(z, TOKENS, t), entropy], ids=["logprobs", "entropy"])
def test_values_and_gradients_are_those_of_float64(kernels, function, dtype, temperature):
    logits = random_logits(dtype)
    values, gradient = answers(lambda z: function(z, temperature), logits)
    exact, true = answers(lambda z: function(z, temperature), logits.double())
    torch.testing.assert_close(values, exact.float(), rtol=1e-6, atol=1e-5)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), true, rtol=1e-5 if dtype is torch.float32 else 8e-3, atol=1e-5)


@pytest.mark.parametrize("function", [lambda z: token_logprobs(z, TOKENS), entropy], ids=["logprobs", "entropy"])
def test_large_logits_lose_no_digits(kernels, function):
    logits = random_logits() + 1000
    torch.testing.assert_close(function(logits), function(logits.double()).float(), rtol=1e-6, atol=2e-6)


def test_tokens_and_logits_may_lie_apart_in_memory(kernels):
    logits, tokens = random_logits(), torch.stack([TOKENS, TOKENS], 1)[:, 0]
    expected = token_logprobs(logits, TOKENS)
    assert not tokens.is_contiguous()
    assert torch.equal(token_logprobs(logits, tokens), expected)
    assert torch.equal(token_logprobs(logits.T.contiguous().T, tokens), expected)


def test_a_token_outside_of_the_vocabulary_has_no_probability(kernels):
    values = token_logprobs(random_logits(), torch.tensor([-1, WIDTH, 70, 64]))
    assert values.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize("function", [lambda z: token_logprobs(z, TOKENS), entropy], ids=["logprobs", "entropy"])
def test_rows_left_out_of_the_loss_get_zero_gradients_though_they_hold_nan(kernels, function):
    logits = random_logits()
    logits[1] = float("nan")
    logits.requires_grad_()
    torch.where(torch.tensor([True, False, True, True]), function(logits), 0).sum().backward()
    assert (logits.grad[1] == 0).all() and torch.isfinite(logits.grad).all()
    assert (logits.grad[[0, 2, 3]] != 0).any(-1).all()


def test_only_the_logits_and_numbers_of_rows_are_kept_for_the_backward_pass(kernels):
    logits = random_logits(torch.bfloat16).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, TOKENS, 0.7)
        entropy(logits)
    assert [t.numel() for t in kept if t.data_ptr() != logits.data_ptr()] == [ROWS] * 6


def test_no_rows(kernels):
    empty = torch.zeros(0, WIDTH, requires_grad=True)
    (token_logprobs(empty, TOKENS[:0]).sum() + entropy(empty).sum()).backward()
    assert empty.grad.shape == (0, WIDTH)
