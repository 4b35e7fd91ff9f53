"""Triton kernels of `logprobs`: each pass reads the logits once, in their own precision, and writes nothing else of
their size than their gradient.

One program computes one row, block by block in a fixed order, in float32. The running maximum and sum are those of
Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". Logits enter only as differences from their
row's maximum, so large ones lose no digits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits of a row that are read at a time."""
WARPS = 8


@triton.jit
def _distribution(  # type: ignore[no-untyped-def]
    logits, tokens, logprobs, entropies, maxima, log_sums, temperature, width, block: tl.constexpr
):
    """With z = logits / temperature: log p(token), H, max z, and log sum exp(z - max z)."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)  # of exp(z - maximum)
    weighted = tl.full((), 0.0, tl.float32)  # of exp(z - maximum) (z - maximum)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        z = tl.load(start + column, mask=column < width, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(maximum, tl.max(z, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far
        change = tl.where(maximum == float("-inf"), 0.0, maximum - shift)
        kept = tl.where(maximum == float("-inf"), 0.0, tl.exp(change))
        p = tl.exp(z - shift)
        weighted = kept * (weighted + total * change) + tl.sum(tl.where(p == 0, 0.0, p * (z - shift)), 0)
        total = total * kept + tl.sum(p, 0)
        maximum = higher
    log_sum = tl.log(total)
    token = tl.load(tokens + row)
    # NaN for a token that there is not.
    z = tl.load(start + token, mask=(token >= 0) & (token < width), other=float("nan")).to(tl.float32) / temperature
    tl.store(logprobs + row, z - maximum - log_sum)
    tl.store(entropies + row, log_sum - weighted / total)
    tl.store(maxima + row, maximum)
    tl.store(log_sums + row, log_sum)


@triton.jit
def _logprob_gradient(  # type: ignore[no-untyped-def]
    logits, tokens, maxima, log_sums, grad_output, grad, temperature, width, block: tl.constexpr
):
    """(onehot - p) grad_output / temperature; zero where `grad_output` is, whatever the logits are."""
    row = tl.program_id(0).to(tl.int64)
    factor, token = tl.load(grad_output + row) / temperature, tl.load(tokens + row)
    maximum, log_sum = tl.load(maxima + row), tl.load(log_sums + row)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        z = tl.load(logits + row * width + column, mask=column < width).to(tl.float32) / temperature
        part = (tl.where(column == token, 1.0, 0.0) - tl.exp(z - maximum - log_sum)) * factor
        tl.store(grad + row * width + column, tl.where(factor == 0, 0.0, part), mask=column < width)


@triton.jit
def _entropy_gradient(  # type: ignore[no-untyped-def]
    logits, entropies, maxima, log_sums, grad_output, grad, temperature, width, block: tl.constexpr
):
    """-p (log p + H) grad_output / temperature; zero where p or `grad_output` is."""
    row = tl.program_id(0).to(tl.int64)
    factor, entropy = tl.load(grad_output + row) / temperature, tl.load(entropies + row)
    maximum, log_sum = tl.load(maxima + row), tl.load(log_sums + row)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        z = tl.load(logits + row * width + column, mask=column < width).to(tl.float32) / temperature
        logprob = z - maximum - log_sum
        p = tl.exp(logprob)
        part = tl.where(p == 0, 0.0, -p * (logprob + entropy) * factor)
        tl.store(grad + row * width + column, tl.where(factor == 0, 0.0, part), mask=column < width)


def distribution(logits: Tensor, tokens: Tensor, temperature: float) -> list[Tensor]:
    """Four times [N] float32 from `[N, V]` contiguous logits: log-probabilities of `tokens` [N], entropies, and the
    maxima and logarithms of sums that `_distribution` describes."""
    columns = [torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(4)]
    _launch(_distribution, logits, tokens.contiguous(), *columns, temperature)
    return columns


def logprob_gradient(logits: Tensor, *columns: Tensor, temperature: float) -> Tensor:
    """[N, V] gradient of log-probabilities in the logits' dtype; `columns` [N] are those of `_logprob_gradient`."""
    return _gradient(_logprob_gradient, logits, columns, temperature)


def entropy_gradient(logits: Tensor, *columns: Tensor, temperature: float) -> Tensor:
    """[N, V] gradient of entropies in the logits' dtype; `columns` [N] are those of `_entropy_gradient`."""
    return _gradient(_entropy_gradient, logits, columns, temperature)


def _gradient(kernel: Any, logits: Tensor, columns: tuple[Tensor, ...], temperature: float) -> Tensor:
    grad = torch.empty_like(logits)
    _launch(kernel, logits, *(column.contiguous() for column in columns), grad, temperature)
    return grad


def _launch(kernel: Any, logits: Tensor, *others: Any) -> None:
    rows, width = logits.shape
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            kernel[(rows,)](logits, *others, width, BLOCK, num_warps=WARPS)
