"""Log-probabilities and entropies are exact, and so are their gradients, in both precisions and across chunks."""

import math

import pytest
import torch

from rlhf_ray.algorithms import logprobs as module
from rlhf_ray.algorithms.logprobs import SamplingMask, entropy, masked_distributions, token_logprobs
from rlhf_ray.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[2**24, 7], ids=["one-chunk", "a-row-a-chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)


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


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradient_of_entropy(chunk, temperature):
    assert torch.autograd.gradcheck(lambda z: entropy(z, temperature), random_logits().requires_grad_())


def test_the_entropy_at_a_temperature_is_that_of_divided_logits(chunk):
    torch.testing.assert_close(entropy(random_logits(), 0.6), entropy(random_logits() / 0.6))


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


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_temperature_must_be_positive_and_finite(temperature):
    for function in (lambda z: token_logprobs(z, TOKENS, temperature), lambda z: entropy(z, temperature)):
        with pytest.raises(ConfigError, match=f"temperature={temperature}"):
            function(random_logits())


LISTED = torch.tensor([[2, 0, -1], [1, -1, -1], [4, 2, 3]])
PICKED = torch.tensor([0, 1, 3])
"""Tokens that are in these lists."""
OTHERS = torch.tensor([4, 3, 0])
"""Tokens that are not."""


def explicit(logits, tokens, possible):
    """log p(y) = z_y - log sum over the possible tokens of exp z, row by row, and the entropies."""
    logprobs, entropies = [], []
    for row, token, allowed in zip(logits, tokens.tolist(), possible, strict=True):
        total = sum(math.exp(row[v]) for v in allowed)
        p = [math.exp(row[v]) / total for v in allowed]
        logprobs.append(float(row[token]) - math.log(total))
        entropies.append(-sum(x * math.log(x) for x in p))
    return logprobs, entropies


@pytest.mark.parametrize(("only", "tokens", "possible"), [
    (True, PICKED, [{2, 0}, {1}, {4, 2, 3}]), (False, OTHERS, [{1, 3, 4}, {0, 2, 3, 4}, {0, 1}]),
], ids=["only-listed", "all-but-listed"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_masked_distributions_are_those_over_what_is_possible(chunk, only, tokens, possible, temperature):
    logits = random_logits(shape=(3, 5)).requires_grad_()
    restricted, places = masked_distributions(logits, tokens, SamplingMask(LISTED, only))
    logprobs = token_logprobs(restricted, places, temperature)
    h = entropy(restricted / temperature)
    expected = explicit((logits.detach() / temperature).tolist(), tokens, possible)
    assert logprobs.tolist() == pytest.approx(expected[0]) and h.tolist() == pytest.approx(expected[1], abs=1e-12)
    (2 * logprobs + h).sum().backward()
    impossible = torch.tensor([[v not in allowed for v in range(5)] for allowed in possible])
    assert (logits.grad[impossible] == 0).all(), "what cannot be sampled is not trained"
    mine = logits.detach().clone().requires_grad_()
    filled = (mine / temperature).masked_fill(impossible, -torch.inf).log_softmax(-1)
    own = filled.gather(1, tokens[:, None])[:, 0] * 2 - (filled.exp() * filled.masked_fill(impossible, 0)).sum(-1)
    own.sum().backward()
    torch.testing.assert_close(logits.grad, mine.grad)


def test_a_mask_that_lists_nothing_to_leave_out_changes_nothing():
    logits, nothing = random_logits(shape=(3, 5)), torch.full((3, 2), -1)
    same, tokens = masked_distributions(logits, PICKED, SamplingMask(nothing, only=False))
    assert same.tolist() == logits.tolist() and tokens is PICKED


@pytest.mark.parametrize("only", [True, False])
def test_masks_are_cut_and_filled_up_as_their_tokens_are(only):
    mask = SamplingMask(LISTED, only)
    assert [part.listed.tolist() for part in mask.split(2)] == [LISTED[:2].tolist(), LISTED[2:].tolist()]
    filled = masked_distributions(random_logits(shape=(5, 5)), torch.cat([PICKED, torch.zeros(2, dtype=torch.long)]),
                                  mask.padded(2))
    assert entropy(filled[0])[3:].tolist() == ([0, 0] if only else entropy(random_logits(shape=(5, 5)))[3:].tolist())
