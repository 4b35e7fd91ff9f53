"""Triton kernel of `fingerprint`: one pass reads the words and writes two sums for each block, which torch adds.

The plain passes write every word's weight and product to memory, so they take twenty times as long.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Words of one program."""
WARPS = 8


@triton.jit
def _weighted_sums(  # type: ignore[no-untyped-def]
    words, sums, count, first_seed: tl.constexpr, second_seed: tl.constexpr, golden: tl.constexpr,
    first: tl.constexpr, second: tl.constexpr, block: tl.constexpr
):
    """sums[0] and sums[1], `[programs]` each: of words * weights, modulo 2^64, in this program's block."""
    program = tl.program_id(0).to(tl.int64)  # places exceed 32 bits from 16 GiB on
    place = program * block + tl.arange(0, block)
    word = tl.load(words + place, mask=place < count, other=0)
    total = tl.sum(word * _weight(place + 1 + first_seed, golden, first, second), 0)
    tl.store(sums + program, total)
    total = tl.sum(word * _weight(place + 1 + second_seed, golden, first, second), 0)
    tl.store(sums + tl.num_programs(0) + program, total)


@triton.jit
def _weight(z, golden: tl.constexpr, first: tl.constexpr, second: tl.constexpr):  # type: ignore[no-untyped-def]
    z = z * golden
    z = (z ^ (z >> 30)) * first
    z = (z ^ (z >> 27)) * second
    return (z ^ (z >> 31)) | 1


def weighted_sums(words: Tensor, seeds: Sequence[int], constants: Sequence[int]) -> Tensor:
    """[2] int64: the sums of `fingerprint` over `[n]` int64 words, for two seeds and splitmix64's three constants."""
    programs = triton.cdiv(len(words), BLOCK)
    sums = torch.empty(2, programs, dtype=torch.int64, device=words.device)
    if programs:
        with torch.cuda.device_of(words):  # Triton launches on the current device
            _weighted_sums[(programs,)](words, sums, len(words), *seeds, *constants, BLOCK, num_warps=WARPS)
    return sums.sum(1)
