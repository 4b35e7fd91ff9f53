"""Digests of tensors that never leave their device, to verify transfers from GPU to GPU where they arrive.

XXH3, which verifies transfers through the object store (`manifest`), reads bytes in CPU memory. Here a tensor's 64-bit
words x_i are weighted and summed, sum(x_i * w_i) mod 2^64, twice, with odd weights w_i that a mixing function derives
from each position (splitmix64: Steele, Lea and Flood 2014, fig. 16; with arithmetic shifts, as torch has them). With
odd weights every single changed word changes the sum, and swapped words do not cancel. Integer sums do not depend on
their order, so every device computes the same digest; GPUs have a kernel for it (`fingerprint_on_gpu`). It guards
against damage and mix-ups, not against an adversary.
"""

from __future__ import annotations

import json

import torch
import xxhash
from torch import Tensor

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import TensorEntry

WORD = 8
"""Bytes."""
PIECE = 2**22
"""Words processed at a time: 32 MiB, and three times as much for their weights."""
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""splitmix64's constants as signed numbers."""
SEEDS = (0, 0x243F6A8885A308D3)


def fingerprint(entry: TensorEntry, tensor: Tensor) -> str:
    """128-bit hex digest of a tensor's name, dtype, shape and bytes, whatever device it is on."""
    words = _words(tensor)
    if words.is_cuda:
        from rlhf_ray.weights.fingerprint_on_gpu import weighted_sums

        sums = weighted_sums(words, SEEDS, (GOLDEN, FIRST, SECOND))
    else:
        sums = _weighted_sums(words)
    values = [int(value) for value in sums.tolist()]
    return xxhash.xxh3_128(json.dumps([entry.name, entry.dtype, list(entry.shape), values]).encode()).hexdigest()


def require_fingerprint(entry: TensorEntry, tensor: Tensor, digest: str) -> None:
    """Check that a received tensor is the one that was sent.

    Raises:
        WeightsError: its shape, dtype or digest differs.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise WeightsError(f"tensor {entry.name!r} arrived as {dtype} {tuple(tensor.shape)}, but was announced as "
                           f"{entry.dtype} {entry.shape}; publish this version again")
    if (actual := fingerprint(entry, tensor)) != digest:
        raise WeightsError(f"tensor {entry.name!r} arrived with digest {actual}, expected {digest}; "
                           "publish this version again")


def _weighted_sums(words: Tensor) -> Tensor:
    """[2] int64 for `[n]` words, a few at a time."""
    sums = torch.zeros(len(SEEDS), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE]
        places = torch.arange(start + 1, start + 1 + len(piece), dtype=torch.int64, device=words.device)
        sums += torch.stack([(piece * _mixed(places + seed)).sum() for seed in SEEDS])
    return sums


def _words(tensor: Tensor) -> Tensor:
    """A tensor's bytes as [n] int64, the last word padded with zeros."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % WORD:
        flat = torch.nn.functional.pad(flat, (0, WORD - len(flat) % WORD))
    elif flat.storage_offset() % WORD:
        flat = flat.clone()  # a slice of a packed buffer may be unaligned
    return flat.view(torch.int64)


def _mixed(places: Tensor) -> Tensor:
    """An odd weight for each position."""
    z = places * GOLDEN
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return (z ^ (z >> 31)) | 1
