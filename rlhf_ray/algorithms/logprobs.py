"""Log-probabilities and entropies of next-token distributions, without a second copy of the logits.

The logits of a batch are its largest tensor. Autograd's own path would keep a float32 copy of them and make several
more in the backward pass. Here only the logits as given are kept, and only their gradient is allocated, in their own
dtype: CPUs process a few rows at a time, and GPUs have kernels for whole passes (`logprobs_on_gpu`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rlhf_ray.algorithms.masking import wide
from rlhf_ray.errors import ConfigError

CHUNK_ELEMENTS = 2**17
"""Entries processed at a time: as many as fit a CPU's cache (512 KiB of float32)."""


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the given tokens, in nats.

    Aligned as given: `logits[b, t]` is the distribution that `tokens[b, t]` was drawn from, so a caller with a causal
    model shifts first. Shift the tokens rather than the logits: a sliced logits tensor has to be copied.

    Args:
        logits: `[B, T, V]` (or any `[..., V]`), float; half precision is computed in float32.
        tokens: `[B, T]` (or `[...]`) integers in [0, V).
        temperature: of the sampling distribution, > 0.

    Returns:
        `[B, T]` float32 (float64 for float64 logits). Where the incoming gradient is 0, so is the gradient of the
        logits, whatever they are: masked positions may hold NaN.

    Raises:
        ConfigError: temperature is not positive and finite.
    """
    _require_temperature(temperature)
    flat = logits.reshape(-1, logits.shape[-1])
    picked: Tensor = _TokenLogprobs.apply(flat, tokens.reshape(-1).long(), float(temperature))
    return picked.view(tokens.shape)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats.

    Args:
        logits: `[B, T, V]` (or any `[..., V]`), float; -inf entries (tokens ruled out) count as probability 0.
        temperature: > 0.

    Returns:
        `[B, T]` float32 (float64 for float64 logits); gradients behave as in `token_logprobs`.

    Raises:
        ConfigError: as `token_logprobs`.
    """
    _require_temperature(temperature)
    flat = logits.reshape(-1, logits.shape[-1])
    entropies: Tensor = _Entropy.apply(flat, float(temperature))
    return entropies.view(logits.shape[:-1])


def _require_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature={temperature} must be positive and finite: logits are divided by it")


@dataclass(frozen=True)
class SamplingMask:
    """The tokens that each of n tokens was sampled among."""

    listed: Tensor
    """[n, L] int64 token ids; -1 fills up shorter lists."""
    only: bool
    """True: the listed tokens only. False: all but the listed ones."""

    def padded(self, count: int) -> "SamplingMask":
        """The mask with `count` more tokens, which were sampled among token 0 only (`only`) or among all."""
        listed = pad(self.listed, (0, 0, 0, count), value=-1)
        if self.only:
            listed[len(self.listed) :, 0] = 0
        return replace(self, listed=listed)

    def split(self, pieces: int) -> list["SamplingMask"]:
        """As `Tensor.tensor_split`."""
        return [replace(self, listed=piece) for piece in self.listed.tensor_split(pieces)]


def masked_distributions(logits: Tensor, tokens: Tensor, mask: SamplingMask) -> tuple[Tensor, Tensor]:
    """The distributions that tokens were sampled from, whose other tokens have probability 0: with the mask's set S of
    possible tokens, log p(y) = z_y / temperature - log sum_{v in S} exp(z_v / temperature).

    Policies compared by a ratio must have the same S, the one of the policy that sampled (DeepSeek-AI 2025,
    DeepSeek-V3.2, section 3.1, "Keep Sampling Mask").

    Args:
        logits: `[n, V]`.
        tokens: `[n]` sampled tokens, which are possible.

    Returns:
        logits `[n, L]` of the listed tokens (-inf where there are fewer) and the tokens' places among them `[n]`, if
        only the listed ones are possible. Otherwise logits `[n, V]` with -inf at the listed ones, and `tokens`.
    """
    if mask.only:
        possible = logits.gather(-1, mask.listed.clamp(min=0)).masked_fill(mask.listed < 0, -torch.inf)
        return possible, (mask.listed == tokens[:, None]).int().argmax(-1)
    # The last column takes the entries that list nothing. How many there are is not asked: a GPU would have to answer.
    vocabulary = logits.shape[-1]
    listed = mask.listed.masked_fill(mask.listed < 0, vocabulary)
    impossible = torch.zeros(len(listed), vocabulary + 1, dtype=torch.bool, device=logits.device)
    return logits.masked_fill(impossible.scatter_(-1, listed, True)[:, :vocabulary], -torch.inf), tokens


def _kernels(logits: Tensor) -> Any:
    """The module of kernels that computes these logits; None on CPUs and for float64."""
    if not logits.is_cuda or logits.dtype is torch.float64:
        return None
    from rlhf_ray.algorithms import logprobs_on_gpu

    return logprobs_on_gpu


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices over the rows of `[N, V]` logits, each of about CHUNK_ELEMENTS entries."""
    step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over temperature, in float32 or wider; not a copy where nothing changes."""
    return wide(logits) if temperature == 1 else wide(logits) / temperature


class _TokenLogprobs(torch.autograd.Function):
    """y = log softmax(z)[token] with z = logits / temperature; dy/dlogits = (onehot - softmax(z)) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        ctx.temperature = temperature
        if kernels := _kernels(logits):
            logits = logits.contiguous()
            found, _, *sums = kernels.distribution(logits, tokens, temperature)
            ctx.save_for_backward(logits, tokens, *sums)
            return cast(Tensor, found)
        logprobs = wide(logits.new_empty(len(logits)))
        for rows in _chunks(logits):
            # Softmax and its logarithm are one kernel each; logsumexp is four, and takes twice as long.
            whole = _scaled(logits[rows], temperature).log_softmax(-1)
            logprobs[rows] = whole.gather(-1, tokens[rows, None])[:, 0]
        ctx.save_for_backward(logits, tokens)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, *sums = ctx.saved_tensors
        if sums:
            columns = (tokens, *sums, grad_output)
            return _kernels(logits).logprob_gradient(logits, *columns, temperature=ctx.temperature), None, None
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            g = grad_output[rows, None] / ctx.temperature
            part = _scaled(logits[rows], ctx.temperature).softmax(-1).mul_(-g).scatter_add_(-1, tokens[rows, None], g)
            grad[rows] = part.masked_fill_(g == 0, 0)
        return grad, None, None


class _Entropy(torch.autograd.Function):
    """H = -sum p log p with p = softmax(logits / temperature); dH/dlogits = -p (log p + H) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        ctx.temperature = temperature
        if kernels := _kernels(logits):
            logits = logits.contiguous()
            any_token = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            _, found, *sums = kernels.distribution(logits, any_token, temperature)
            ctx.save_for_backward(logits, found, *sums)
            return cast(Tensor, found)
        entropies = wide(logits.new_empty(len(logits)))
        for rows in _chunks(logits):
            entropies[rows] = torch.special.entr(_scaled(logits[rows], temperature).softmax(-1)).sum(-1)
        ctx.save_for_backward(logits, entropies)
        return entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, entropies, *sums = ctx.saved_tensors
        if sums:
            columns = (entropies, *sums, grad_output)
            return _kernels(logits).entropy_gradient(logits, *columns, temperature=ctx.temperature), None
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            g = grad_output[rows, None] / ctx.temperature
            p = _scaled(logits[rows], ctx.temperature).softmax(-1)
            part = torch.special.entr(p).sub_(p.mul_(entropies[rows, None])).mul_(g)
            grad[rows] = part.masked_fill_(g == 0, 0)
        return grad, None
