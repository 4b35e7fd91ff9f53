"""Triton kernels of `logprobs`: each pass reads the logits once or twice, in their own precision, and writes nothing
else of their size than their gradient.

One program computes one row, whose pieces it adds up in a fixed order, in float32. The running maximum and sum are
those of Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 4096
"""Logits of a row that are read at a time."""
WARPS = 8


@triton.jit
def _pass(  # type: ignore[no-untyped-def]
    logits, tokens, picked, entropies, normalizers, temperature, width, piece: tl.constexpr
):
    """log p(token), H and log sum exp(z) of a row's distribution, with z = logits / temperature."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    high = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)  # of exp(z - high)
    weighted = tl.full((), 0.0, tl.float32)  # of exp(z - high) z
    for first in range(0, width, piece):
        place = first + tl.arange(0, piece)
        z = tl.load(start + place, mask=place < width, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(high, tl.max(z, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far
        p, kept = tl.exp(z - shift), tl.exp(high - shift)
        total = total * kept + tl.sum(p, 0)
        weighted = weighted * kept + tl.sum(tl.where(p == 0, 0.0, p * z), 0)
        high = higher
    normalizer = high + tl.log(total)
    token = tl.load(tokens + row)
    tl.store(picked + row, tl.load(start + token).to(tl.float32) / temperature - normalizer)
    tl.store(entropies + row, normalizer - weighted / total)
    tl.store(normalizers + row, normalizer)


@triton.jit
def _logprob_gradient(  # type: ignore[no-untyped-def]
    logits, tokens, normalizers, given, gradient, temperature, width, piece: tl.constexpr
):
    """(onehot - p) given / temperature; zero where `given` is, whatever the logits are."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(given + row) / temperature
    token, normalizer = tl.load(tokens + row), tl.load(normalizers + row)
    for first in range(0, width, piece):
        place = first + tl.arange(0, piece)
        z = tl.load(logits + row * width + place, mask=place < width).to(tl.float32) / temperature
        part = (tl.where(place == token, 1.0, 0.0) - tl.exp(z - normalizer)) * factor
        tl.store(gradient + row * width + place, tl.where(factor == 0, 0.0, part), mask=place < width)


@triton.jit
def _entropy_gradient(  # type: ignore[no-untyped-def]
    logits, entropies, normalizers, given, gradient, temperature, width, piece: tl.constexpr
):
    """-p (log p + H) given / temperature; zero where p or `given` is."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(given + row) / temperature
    entropy, normalizer = tl.load(entropies + row), tl.load(normalizers + row)
    for first in range(0, width, piece):
        place = first + tl.arange(0, piece)
        z = tl.load(logits + row * width + place, mask=place < width).to(tl.float32) / temperature
        p = tl.exp(z - normalizer)
        part = tl.where(p == 0, 0.0, -p * (z - normalizer + entropy) * factor)
        tl.store(gradient + row * width + place, tl.where(factor == 0, 0.0, part), mask=place < width)


def distribution_pass(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[N] float32 log-probabilities of `tokens` [N], entropies, and logarithms of the sums of exp(logits / temperature)
    of `[N, V]` logits."""
    picked, entropies, normalizers = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _launch(_pass, logits, tokens, picked, entropies, normalizers, temperature)
    return picked, entropies, normalizers


def logprob_gradient(logits: Tensor, tokens: Tensor, normalizers: Tensor, given: Tensor, temperature: float) -> Tensor:
    """[N, V] gradient of the log-probabilities in the logits' dtype, times `given` [N]."""
    gradient = torch.empty_like(logits)
    _launch(_logprob_gradient, logits, tokens, normalizers, given.contiguous(), gradient, temperature)
    return gradient


def entropy_gradient(logits: Tensor, entropies: Tensor, normalizers: Tensor, given: Tensor,
                     temperature: float) -> Tensor:
    """[N, V] gradient of the entropies in the logits' dtype, times `given` [N]."""
    gradient = torch.empty_like(logits)
    _launch(_entropy_gradient, logits, entropies, normalizers, given.contiguous(), gradient, temperature)
    return gradient


def _launch(kernel: Any, logits: Tensor, *others: Any) -> None:
    rows, width = logits.shape
    if rows:
        kernel[(rows,)](logits, *others, width, PIECE, num_warps=WARPS)
