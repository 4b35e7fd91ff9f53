"""Buckets: the plan, the bytes, and the digest that refuses damage."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights import manifest
from rlhf_ray.weights.manifest import (
    as_announced,
    checksum,
    digest_of,
    pack,
    plan_buckets,
    seal,
    unpack,
    verified_tensors,
)

SPECS = [("a", (3, 5), "float32"), ("b", (7,), "bfloat16"), ("c", (40, 10), "float32"), ("d", (2,), "float32")]


def tensors_for(specs, seed=0):
    """Random tensors that fit `specs`."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for n, shape, dtype in specs}


def sealed(version=3):
    """One bucket of all SPECS."""
    (entries,) = plan_buckets(SPECS, 1 << 20)
    return seal(version, 0, 1, entries, pack(entries, tensors_for(SPECS)))


def resealed(bucket):
    """The bucket with digests and checksum that fit what it holds now."""
    return seal(bucket.version, bucket.index, bucket.count, bucket.entries, bucket.arrays)


def test_plan_fills_buckets_in_order_and_gives_a_large_tensor_its_own():
    plan = plan_buckets(SPECS, 128)
    assert [[e.name for e in bucket] for bucket in plan] == [["a", "b"], ["c"], ["d"]]
    assert plan[1] == [TensorEntry("c", "float32", (40, 10), 1600)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["float32", "bfloat16", "int64"])),
             min_size=1, max_size=12),
    st.integers(1, 3000),
)
def test_plan_holds_every_tensor_once_and_within_the_limit(shapes, limit):
    specs = [(f"t{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)]
    plan = plan_buckets(specs, limit)
    assert [(e.name, e.shape, e.dtype) for bucket in plan for e in bucket] == specs
    for bucket in plan:
        assert len(bucket) == 1 or sum(e.nbytes for e in bucket) <= limit


def test_plan_refuses_a_name_listed_twice_and_an_empty_list():
    with pytest.raises(WeightsError, match="'a' is listed twice"):
        plan_buckets([SPECS[0], SPECS[0]], 100)
    with pytest.raises(WeightsError, match="empty"):
        plan_buckets([], 100)


def test_unpack_returns_what_was_packed_bit_for_bit_and_neither_copies():
    tensors = tensors_for(SPECS)
    (entries,) = plan_buckets(SPECS, 1 << 20)
    arrays = pack(entries, tensors)
    for array in arrays:
        array.setflags(write=False)  # as it comes out of the object store
    found = dict(unpack(zip(entries, arrays, strict=True)))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert found[name].data_ptr() == tensor.data_ptr()


def test_tensors_are_converted_to_the_planned_dtype_and_may_be_transposed():
    weight = torch.randn(6, 4)
    (entries,) = plan_buckets([("w", (4, 6), "bfloat16")], 1000)
    ((_, found),) = unpack(zip(entries, pack(entries, as_announced(entries, {"w": weight.T})), strict=True))
    assert torch.equal(found, weight.T.to(torch.bfloat16))


def test_tensors_are_converted_where_they_are():
    """On a GPU: half the bytes cross the bus, and its cores convert."""
    (entries,) = plan_buckets([("w", (4, 6), "bfloat16")], 1000)
    ready = as_announced(entries, {"w": torch.empty(4, 6, device="meta")})["w"]
    assert (ready.device.type, ready.dtype) == ("meta", torch.bfloat16)


def test_missing_and_misshapen_tensors_are_named():
    (entries,) = plan_buckets(SPECS[:2], 1000)
    tensors = tensors_for(SPECS[:2])
    with pytest.raises(WeightsError, match=r"'b' was not gathered; got 1 of 2"):
        as_announced(entries, {"a": tensors["a"]})
    with pytest.raises(WeightsError, match=r"'a' has shape \(5, 3\), the plan says \(3, 5\)"):
        as_announced(entries, {**tensors, "a": tensors["a"].T})


def test_tensors_of_an_untouched_bucket_come_as_they_were_and_everything_about_a_damaged_one_is_named():
    bucket = sealed()
    assert list(verified_tensors(bucket)) == list(zip(bucket.entries, bucket.arrays, strict=True))
    damaged = [array.copy() for array in bucket.arrays]
    damaged[1][13] ^= 1
    with pytest.raises(WeightsError) as caught:
        list(verified_tensors(replace(bucket, arrays=damaged)))
    for said in ("bucket 0 of 1", "version 3", "'b'", bucket.digests[1], digest_of(bucket.entries[1], damaged[1])):
        assert said in str(caught.value)


def test_several_threads_find_the_same_digests_and_name_the_first_damaged_tensor(monkeypatch):
    expected = sealed()
    monkeypatch.setattr(manifest, "WORTH_IT", 1)
    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(manifest, "_threads", lambda: pool)
        bucket = sealed()
        assert bucket.digests == expected.digests and bucket.checksum == expected.checksum
        assert list(verified_tensors(bucket)) == list(zip(bucket.entries, bucket.arrays, strict=True))
        damaged = [array.copy() for array in bucket.arrays]
        damaged[1][0] ^= 1
        damaged[2] = damaged[2][1:]
        with pytest.raises(WeightsError, match="tensor 'b' has digest"):
            list(verified_tensors(replace(bucket, arrays=damaged)))
        damaged[1] = damaged[1][1:]
        with pytest.raises(WeightsError, match="'b' has 13 bytes, not 14"):
            list(verified_tensors(replace(bucket, arrays=damaged)))


@pytest.mark.parametrize("change", ["version", "index", "count", "renamed", "swapped", "fewer"])
def test_verify_notices_another_version_place_name_or_number(change):
    bucket = sealed()
    first, second, *rest = bucket.entries
    changes = {
        "version": {"version": 4}, "index": {"index": 1}, "count": {"count": 2},
        "renamed": {"entries": [replace(first, name="z"), second, *rest]},
        "swapped": {"entries": [replace(first, name="b"), replace(second, name="a"), *rest]},
        "fewer": {"arrays": bucket.arrays[:-1]},
    }
    with pytest.raises(WeightsError, match="expected checksum"):
        next(verified_tensors(replace(bucket, **changes[change])))


def test_verify_refuses_more_or_fewer_bytes_than_an_entry_says():
    bucket = sealed()
    arrays = [*bucket.arrays[:-1], np.append(bucket.arrays[-1], np.uint8(0))]
    with pytest.raises(WeightsError, match="'d' has 9 bytes, not 8"):
        list(verified_tensors(resealed(replace(bucket, arrays=arrays))))


def test_a_tensor_s_digest_is_the_same_in_every_version_and_another_under_another_name():
    assert sealed(version=3).digests == sealed(version=4).digests
    bucket = sealed()
    assert digest_of(replace(bucket.entries[0], name="z"), bucket.arrays[0]) != bucket.digests[0]
    assert checksum(bucket.entries, bucket.digests, 3, 0, 1) != checksum(bucket.entries, bucket.digests, 4, 0, 1)
