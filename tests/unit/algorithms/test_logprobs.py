"""Log-probabilities and entropies are exact, and so are their gradients, in both precisions and across chunks."""

import math

import pytest
import torch

from rlhf_ray.algorithms import logprobs as module
from rlhf_ray.algorithms.logprobs import entropy, token_logprobs
from rlhf_ray.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[2**24, 7], ids=["one-chunk", "a-row-a-chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": request.param})


def random_logits(dtype=torch.float64, shape=(2, 3, 5)):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)


TOKENS = torch.tensor([[0, 4, 2], [1, 1, 3]])


def test_logprobs_by_hand(chunk):
    logits = torch.log(torch.tensor([[[1.0, 3.0], [6.0, 2.0]]]))  # odds 1:3 and 6:2
    expected = torch.log(torch.tensor([[3 / 4, 2 / 8]]))
    torch.testing.assert_close(token_logprobs(logits, torch.tensor([[1, 1]])), expected)


def test_temperature_divides_the_logits(chunk):
    logits = torch.log(torch.tensor([[[1.0, 9.0]]]))  # at temperature 2 the odds 1:9 become 1:3
    assert token_logprobs(logits, torch.tensor([[1]]), temperature=2.0).item() == pytest.approx(math.log(3 / 4))


def test_logprobs_equal_log_softmax_at_large_logits(chunk):
    logits = random_logits() * 300
    expected = logits.div(0.7).log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, TOKENS, 0.7), expected, rtol=1e-12, atol=1e-12)


def test_entropy_by_hand(chunk):
    logits = torch.log(torch.tensor([[[1.0, 1.0, 2.0]]]))  # p = 1/4, 1/4, 1/2
    assert entropy(logits).item() == pytest.approx(1.5 * math.log(2))  # 2/4 * 2 ln 2 + 1/2 * ln 2


def test_entropy_of_ruled_out_tokens(chunk):
    logits = torch.tensor([[[0.0, -INF, 0.0]]], requires_grad=True)
    h = entropy(logits)
    h.sum().backward()
    assert h.item() == pytest.approx(math.log(2))
    assert logits.grad.abs().max().item() == pytest.approx(0, abs=1e-7)  # uniform over what is left: at its maximum


def test_bfloat16_logits_are_computed_in_float32(chunk):
    logits = random_logits(torch.bfloat16)
    logps, h = token_logprobs(logits, TOKENS, 0.5), entropy(logits)
    assert logps.dtype == h.dtype == torch.float32
    torch.testing.assert_close(logps, token_logprobs(logits.float(), TOKENS, 0.5), rtol=0, atol=0)
    torch.testing.assert_close(h, entropy(logits.float()), rtol=0, atol=0)


def test_gradients_come_in_the_dtype_of_the_logits(chunk):
    logits = random_logits(torch.bfloat16).requires_grad_()
    (token_logprobs(logits, TOKENS).sum() + entropy(logits).sum()).backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradient_of_logprobs(chunk, temperature):
    logits = random_logits().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, TOKENS, temperature), logits)


def test_gradient_of_entropy(chunk):
    assert torch.autograd.gradcheck(entropy, random_logits().requires_grad_())


@pytest.mark.parametrize("function", [lambda z: token_logprobs(z, TOKENS), entropy], ids=["logprobs", "entropy"])
def test_rows_left_out_of_the_loss_get_zero_gradients_though_they_hold_nan(chunk, function):
    logits = random_logits()
    logits[0, 1] = NAN
    logits.requires_grad_()
    mask = torch.tensor([[True, False, True], [True, True, False]])
    torch.where(mask, function(logits), 0).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).all()


def test_only_the_logits_themselves_are_kept_for_the_backward_pass():
    logits = random_logits(torch.bfloat16, (4, 8, 512)).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, torch.zeros(4, 8, dtype=torch.int64), 0.7)
    others = [t for t in kept if t.data_ptr() != logits.data_ptr()]
    assert len(others) < len(kept)
    assert all(t.numel() <= 4 * 8 for t in others)


def test_int32_tokens_flat_batches_and_empty_batches():
    logits = random_logits(shape=(3, 5))
    tokens = torch.tensor([1, 0, 4], dtype=torch.int32)
    torch.testing.assert_close(token_logprobs(logits, tokens), token_logprobs(logits[None], tokens[None])[0])
    assert token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int32)).shape == (0,)
    assert entropy(torch.zeros(2, 0, 5)).shape == (2, 0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ConfigError, match=f"temperature={temperature}"):
        token_logprobs(random_logits(), TOKENS, temperature)
