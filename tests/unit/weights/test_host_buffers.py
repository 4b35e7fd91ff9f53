"""Buckets on their way from a GPU into main memory; `tests/gpu` pins it."""

import numpy as np
import pytest
import torch

from rlhf_ray.weights.host_buffers import HostBuffers, bytes_needed
from rlhf_ray.weights.manifest import digest_of, plan_buckets, seal
from rlhf_ray.weights.publication import SealedBuckets

SPECS = [("a", (3, 5), "float32"), ("b", (7,), "bfloat16"), ("c", (), "float64"), ("d", (0, 2), "float32"),
         ("e", (65,), "int8")]


def tensors_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: (100 * torch.randn(shape, generator=generator)).to(getattr(torch, dtype))
            for name, shape, dtype in SPECS}


@pytest.fixture
def entries():
    return plan_buckets(SPECS, 1 << 20)[0]


def test_a_bucket_stays_while_the_next_is_copied_and_then_gives_way(entries):
    buffers = HostBuffers(bytes_needed(entries), pinned=False)
    copies = [buffers.copy(entries, tensors_of(seed)) for seed in range(2)]
    for seed, (arrays, waits) in enumerate(copies):
        for (name, tensor), array, wait in zip(tensors_of(seed).items(), arrays, waits, strict=True):
            wait()
            assert bytes(array) == bytes(tensor.view(-1).view(torch.uint8).numpy()), name
    third, _ = buffers.copy(entries, tensors_of(2))
    assert third[0].ctypes.data == copies[0][0][0].ctypes.data != copies[1][0][0].ctypes.data


def test_no_digest_is_computed_before_its_bytes_have_arrived(entries):
    expected = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors_of(0).values()]
    arrays = [np.zeros_like(array) for array in expected]

    def arrival(place):
        return lambda: np.copyto(arrays[place], expected[place])

    bucket = seal(1, 0, 1, entries, arrays, [arrival(place) for place in range(len(arrays))])
    assert bucket.digests == [digest_of(entry, array) for entry, array in zip(entries, expected, strict=True)]


def test_a_publication_through_buffers_is_the_one_without(monkeypatch):
    tensors = tensors_of(3)
    plain = SealedBuckets(SPECS, tensors, 100, lambda names: tensors)
    buffered = SealedBuckets(SPECS, tensors, 100, lambda names: tensors)
    buffers = HostBuffers(max(map(bytes_needed, buffered._whole)), pinned=False)
    monkeypatch.setattr(buffered, "_in_main_memory", buffers.copy)
    for index in range(plain.plan.whole.buckets):
        one, other = plain.bucket(1, index), buffered.bucket(1, index)
        assert one.checksum == other.checksum and list(map(bytes, one.arrays)) == list(map(bytes, other.arrays))
