"""What a publication of weights consists of: which tensors in which bucket, and the digests that verify them.

The digest is XXH3 with 128 bits (35 GB/s on one core here, faster than a memory copy; SHA-256: 2.1, blake2b: 1.4).
It guards against damage and mix-ups, which a 128-bit hash of that quality detects. It does not guard against an
adversary, who in this position could send any weights with a matching digest.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from rlhf_ray.errors import DamagedBucket, WeightsError
from rlhf_ray.records import BucketHead, TensorEntry, WeightBucket

T = TypeVar("T")

MOST_THREADS = 8
"""That pass over the bytes of a bucket. A few saturate the memory of a node."""
WORTH_IT = 8 << 20
"""Bytes that one thread hashes in a millisecond; for fewer, handing over the work takes a noticeable part of it."""
TensorSpec = tuple[str, tuple[int, ...], str]
"""Name, shape and torch dtype name ("float32") of one tensor."""
EXPERTS_INFIX = ".experts."
"""Mixtures of experts keep all experts of a layer in one fused layer."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`, such as "bfloat16".

    Raises:
        WeightsError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"{name!r} is not a torch dtype; entries carry names such as 'float32' or 'bfloat16'")
    return dtype


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorEntry]]:
    """Divide tensors, in the given order, into buckets of at most `bucket_bytes`; a larger tensor gets its own bucket.

    The same input gives the same plan on every rank and at every step, so plans need not be sent.

    Raises:
        WeightsError: a name occurs twice, or the list is empty.
    """
    if not tensors:
        raise WeightsError("nothing to publish: the list of tensors is empty")
    buckets: list[list[TensorEntry]] = []
    seen: set[str] = set()
    filled = 0
    for name, shape, dtype in tensors:
        if name in seen:
            raise WeightsError(f"tensor {name!r} is listed twice; each is published once")
        seen.add(name)
        nbytes = prod(shape) * torch_dtype(dtype).itemsize
        if not buckets or filled + nbytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(TensorEntry(name, dtype, tuple(shape), nbytes))
        filled += nbytes
    return buckets


def pack(entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> list[NDArray[np.uint8]]:
    """One bucket's tensors of a CPU, as `as_announced` returns them, as views of their bytes."""
    return [tensors[entry.name].view(-1).view(torch.uint8).numpy() for entry in entries]


def as_announced(
    entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of one bucket, contiguous and in their entries' dtypes, on their device. A tensor that already is so
    is not copied.

    Raises:
        WeightsError: a tensor is missing, or its shape differs from its entry's.
    """
    ready = {}
    for entry in entries:
        tensor = tensors.get(entry.name)
        if tensor is None:
            raise WeightsError(f"tensor {entry.name!r} was not gathered; got {len(tensors)} of {len(entries)} tensors")
        if tuple(tensor.shape) != entry.shape:
            raise WeightsError(f"tensor {entry.name!r} has shape {tuple(tensor.shape)}, the plan says {entry.shape}")
        ready[entry.name] = tensor.detach().to(torch_dtype(entry.dtype)).contiguous()
    return ready


def unpack(tensors: Iterable[tuple[TensorEntry, NDArray[np.uint8]]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Named views into arrays of bytes, without a copy. Do not write to them: they may be shared memory."""
    _silence_read_only_warning()
    for entry, array in tensors:
        yield entry.name, torch.from_numpy(array).view(torch_dtype(entry.dtype)).view(entry.shape)


@cache
def _silence_read_only_warning() -> None:
    """Trigger and suppress torch's warning about read-only memory, which it issues once per process."""
    array = np.zeros(1, dtype=np.uint8)
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.from_numpy(array)


def digest_of(entry: TensorEntry, array: NDArray[np.uint8]) -> str:
    """XXH3-128 hex digest over a tensor's name, dtype, shape and bytes, independent of the version."""
    digest = xxhash.xxh3_128(json.dumps([entry.name, entry.dtype, list(entry.shape)]).encode())
    digest.update(array.data)
    return digest.hexdigest()


def _bytes_in(arrays: Iterable[NDArray[np.uint8]]) -> int:
    return sum(array.nbytes for array in arrays)


def checksum(entries: Sequence[TensorEntry], digests: Sequence[str], version: int, index: int, count: int) -> str:
    """XXH3-128 hex digest over a bucket's position in its publication, its entries and their digests."""
    head = [version, index, count, [[e.name, e.dtype, list(e.shape), e.nbytes] for e in entries], list(digests)]
    return xxhash.xxh3_128(json.dumps(head).encode()).hexdigest()


def seal(version: int, index: int, count: int, entries: list[TensorEntry], arrays: list[NDArray[np.uint8]],
         waits: Sequence[Callable[[], Any]] | None = None) -> WeightBucket:
    """A bucket of these tensors with its checksum; computing the digests is the only pass over the bytes.

    Args:
        waits: for each array, what returns once its bytes have arrived (`host_buffers`).
    """
    def digest(entry: TensorEntry, array: NDArray[np.uint8], wait: Callable[[], Any]) -> str:
        wait()
        return digest_of(entry, array)

    digests = list(in_parallel(digest, entries, arrays, waits or [bool] * len(arrays), nbytes=_bytes_in(arrays)))
    return WeightBucket(version, index, count, entries, digests,
                        checksum(entries, digests, version, index, count), arrays)


def require_checksum(bucket: BucketHead) -> str:
    """Check a bucket's description against its checksum; returns a label of the bucket for messages.

    Raises:
        DamagedBucket: version, index, entries or digests differ from those that were sealed.
    """
    label = f"bucket {bucket.index} of {bucket.count}, weights version {bucket.version}"
    actual = checksum(bucket.entries, bucket.digests, bucket.version, bucket.index, bucket.count)
    if actual != bucket.checksum or len(bucket.entries) != len(bucket.digests):
        raise DamagedBucket(f"{label}: expected checksum {bucket.checksum}, found {actual}")
    return label


def verified_tensors(bucket: WeightBucket) -> Iterator[tuple[TensorEntry, NDArray[np.uint8]]]:
    """A bucket's tensors in order, each yielded once its digest is verified.

    Raises:
        DamagedBucket: at the first tensor whose digest differs, or whose number of bytes is not its entry's.
    """
    label = require_checksum(bucket)
    if len(bucket.entries) != len(bucket.arrays):
        raise DamagedBucket(f"{label}: expected checksum and bytes of {len(bucket.entries)} tensors, found those of "
                            f"{len(bucket.arrays)}")
    found = in_parallel(digest_of, bucket.entries, bucket.arrays, nbytes=_bytes_in(bucket.arrays))
    for entry, array, digest in zip(bucket.entries, bucket.arrays, bucket.digests, strict=True):
        if array.nbytes != entry.nbytes:
            raise DamagedBucket(f"{label}: tensor {entry.name!r} has {array.nbytes} bytes, not {entry.nbytes}")
        if (actual := next(found)) != digest:
            raise DamagedBucket(f"{label}: tensor {entry.name!r} has digest {actual}, expected {digest}")
        yield entry, array


def fused_groups(names: Iterable[str], fused: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Names that share a layer with others, a list for each such layer.

    Args:
        names: names of a checkpoint's tensors, such as "model.layers.0.self_attn.q_proj.weight".
        fused: parts of each fused layer, such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}; vLLM's models have it
            as `packed_modules_mapping`.
    """
    whole = {part: layer for layer, parts in fused.items() for part in parts}
    groups: dict[str, list[str]] = {}
    for name in names:
        module = name.partition(EXPERTS_INFIX)[0] if EXPERTS_INFIX in name else name.rpartition(".")[0]
        layer = ".".join(whole.get(part, part) for part in module.split("."))
        groups.setdefault(layer, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def expand_fused_groups(changing: Iterable[str], groups: Iterable[Sequence[str]]) -> set[str]:
    """`changing`, and every name that shares a fused layer with one of them."""
    names = set(changing)
    return names.union(*(group for group in groups if names.intersection(group)))


def in_parallel(function: Callable[..., T], *arguments: Iterable[Any], nbytes: int) -> Iterator[T]:
    """As `map`, for work that releases Python's lock, as XXH3 and memory copies do: results and errors in the order of
    the arguments. On several threads if there are `nbytes` to pass over and this process may use enough CPUs."""
    threads = _threads() if nbytes >= WORTH_IT else None
    return map(function, *arguments) if threads is None else threads.map(function, *arguments)


@cache
def _threads() -> ThreadPoolExecutor | None:
    """One for every second CPU, because the other side of a publication is at work too; None if that is one."""
    number = min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2)
    return ThreadPoolExecutor(number, "weights") if number > 1 else None
