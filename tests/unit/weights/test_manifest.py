"""Buckets: the plan, the bytes, and the digest that refuses damage."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import TensorEntry, WeightBucket
from rlhf_ray.weights.manifest import ALIGNMENT, checksum, pack, plan_buckets, unpack, verify

SPECS = [("a", (3, 5), "float32"), ("b", (7,), "bfloat16"), ("c", (40, 10), "float32"), ("d", (2,), "float32")]


def tensors_for(specs, seed=0):
    """Random tensors that fit `specs`."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for n, shape, dtype in specs}


def sealed(version=3):
    """One bucket of all SPECS."""
    (entries,) = plan_buckets(SPECS, 1 << 20)
    data = pack(entries, tensors_for(SPECS))
    return WeightBucket(version, 0, 1, entries, data, checksum(data, entries, version))


def test_plan_fills_buckets_in_order_and_gives_a_large_tensor_its_own():
    plan = plan_buckets(SPECS, 128)
    assert [[e.name for e in bucket] for bucket in plan] == [["a", "b"], ["c"], ["d"]]
    assert [(e.offset, e.nbytes) for e in plan[0]] == [(0, 60), (64, 14)]
    assert plan[1] == [TensorEntry("c", "float32", (40, 10), 0, 1600)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["float32", "bfloat16", "int64"])),
             min_size=1, max_size=12),
    st.integers(1, 3000),
)
def test_plan_holds_every_tensor_once_aligned_and_within_the_limit(shapes, limit):
    specs = [(f"t{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)]
    plan = plan_buckets(specs, limit)
    assert [(e.name, e.shape, e.dtype) for bucket in plan for e in bucket] == specs
    for bucket in plan:
        assert len(bucket) == 1 or bucket[-1].offset + bucket[-1].nbytes <= limit
        assert all(e.offset % ALIGNMENT == 0 for e in bucket)
        assert all(x.offset + x.nbytes <= y.offset for x, y in pairwise(bucket))


def test_plan_refuses_a_name_listed_twice_and_an_empty_list():
    with pytest.raises(WeightsError, match="'a' is listed twice"):
        plan_buckets([SPECS[0], SPECS[0]], 100)
    with pytest.raises(WeightsError, match="empty"):
        plan_buckets([], 100)


def test_unpack_returns_what_was_packed_bit_for_bit_without_copying():
    tensors = tensors_for(SPECS)
    (entries,) = plan_buckets(SPECS, 1 << 20)
    data = pack(entries, tensors)
    data.setflags(write=False)  # as it comes out of the object store
    found = dict(unpack(entries, data))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        inside = found[name].data_ptr() - data.ctypes.data
        assert inside == next(e.offset for e in entries if e.name == name)


def test_pack_converts_to_the_planned_dtype_and_takes_transposed_tensors():
    weight = torch.randn(6, 4)
    (entries,) = plan_buckets([("w", (4, 6), "bfloat16")], 1000)
    ((_, found),) = unpack(entries, pack(entries, {"w": weight.T}))
    assert torch.equal(found, weight.T.to(torch.bfloat16))


def test_pack_names_missing_and_misshapen_tensors():
    (entries,) = plan_buckets(SPECS[:2], 1000)
    tensors = tensors_for(SPECS[:2])
    with pytest.raises(WeightsError, match=r"'b' was not gathered; got 1 of 2"):
        pack(entries, {"a": tensors["a"]})
    with pytest.raises(WeightsError, match=r"'a' has shape \(5, 3\), the plan says \(3, 5\)"):
        pack(entries, {**tensors, "a": tensors["a"].T})


def test_verify_accepts_an_untouched_bucket_and_names_everything_about_a_damaged_one():
    bucket = sealed()
    verify(bucket)
    damaged = bucket.data.copy()
    damaged[61] ^= 1  # padding between two tensors counts too
    found = checksum(damaged, bucket.entries, 3)
    with pytest.raises(WeightsError) as caught:
        verify(replace(bucket, data=damaged))
    for said in ("bucket 0 of 1", "version 3", bucket.checksum, found):
        assert said in str(caught.value)


@pytest.mark.parametrize("change", [
    {"version": 4},
    {"entries": "renamed"},
    {"entries": "swapped"},
    {"data": "longer"},
])
def test_verify_notices_other_versions_names_places_and_lengths(change):
    bucket = sealed()
    first, second, *rest = bucket.entries
    change = {
        "renamed": {"entries": [replace(first, name="z"), second, *rest]},
        "swapped": {"entries": [replace(first, name="b"), replace(second, name="a"), *rest]},
        "longer": {"data": np.append(bucket.data, np.uint8(0))},
    }.get(next(iter(change.values())), change)
    with pytest.raises(WeightsError, match="expected checksum"):
        verify(replace(bucket, **change))


def test_verify_refuses_an_entry_that_reaches_outside_the_buffer():
    bucket = sealed()
    entries = [*bucket.entries[:-1], replace(bucket.entries[-1], nbytes=10_000)]
    outside = replace(bucket, entries=entries, checksum=checksum(bucket.data, entries, 3))
    with pytest.raises(WeightsError, match="'d' ends at byte"):
        verify(outside)
