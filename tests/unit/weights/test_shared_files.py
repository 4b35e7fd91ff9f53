"""Buckets in shared memory: kept for the next publication, and never written to while another process maps them."""

import json
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlhf_ray.records import TensorEntry
from rlhf_ray.weights import manifest
from rlhf_ray.weights import shared_files as module
from rlhf_ray.weights.shared_files import StagedFiles, mapped_files, read_file

READER = """
import sys
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.shared_files import mapped_files, read_file

held = []
for line in sys.stdin:
    path, _, size = line.strip().partition(" ")
    if size:
        held = [array for _, array in read_file(path, [TensorEntry("w", "uint8", (int(size),), int(size))])]
    elif path == "drop":
        held = []
    print(sorted({int(value) for array in held for value in array}), mapped_files(), sep=";", flush=True)
"""


def tensors_of(*sizes, value=1):
    """Named arrays of these sizes in bytes, all filled with `value`."""
    return [(TensorEntry(f"t{i}", "uint8", (size,), size), np.full(size, value, np.uint8))
            for i, size in enumerate(sizes)]


def staged(buckets, kept=()):
    """The stage of a publication of these buckets."""
    stage = StagedFiles(kept)
    for bucket in buckets:
        stage.add(bucket)
    return stage


def content(bucket):
    """(name, bytes) of each tensor, as another process reads it."""
    return [(entry.name, bytes(array)) for entry, array in read_file(bucket.file.path, bucket.entries)]


def inodes(stage):
    return [bucket.file.inode for bucket in stage.buckets]


@pytest.fixture
def reader():
    """reader(command): the values in the tensor that another process holds, and the inodes that it maps. Commands are a
    path and a size, "drop", and "look"."""
    process = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(command):
        process.stdin.write(command + "\n")
        process.stdin.flush()
        return [json.loads(part) for part in process.stdout.readline().split(";")]

    yield ask
    process.stdin.close()
    assert process.wait(30) == 0


def test_a_process_that_still_maps_a_bucket_never_sees_the_next_ones_bytes(reader):
    first = staged([tensors_of(5000, value=1)])
    values, mapped = reader(f"{first.buckets[0].file.path} 5000")
    assert values == [1]
    second = staged([tensors_of(5000, value=2)], first.unmapped(mapped))
    assert reader("look") == [[1], mapped]

    values, mapped = reader("drop")
    third = staged([tensors_of(5000, value=3)], first.unmapped(mapped))
    assert inodes(third) == inodes(first) != inodes(second)
    assert content(third.buckets[0]) == [("t0", bytes([3] * 5000))]
    assert content(second.buckets[0]) == [("t0", bytes([2] * 5000))]


def test_a_publication_that_is_not_applied_leaves_the_one_that_is_mapped(reader):
    applied = staged([tensors_of(5000, value=1)] * 2)
    used, free = (bucket.file for bucket in applied.buckets)
    _, mapped = reader(f"{used.path} 5000")
    aborted = staged([tensors_of(5000, value=2)] * 2, applied.unmapped(mapped))
    assert inodes(aborted)[0] == free.inode
    del aborted
    staged([tensors_of(5000, value=3)] * 2)
    assert reader("look") == [[1], [used.inode]]


@pytest.mark.parametrize(("size", "is_kept"), [(10_000, True), (9_000, True), (5_000, True), (4_900, False),
                                               (10_100, False), (1, False)])
def test_a_file_is_kept_for_buckets_that_fit(size, is_kept):
    first = staged([tensors_of(10_000)])
    assert content(first.buckets[0]) == [("t0", bytes([1] * 10_000))]
    second = staged([tensors_of(size, value=2)], first.unmapped(()))
    assert (inodes(second) == inodes(first)) == is_kept
    assert content(second.buckets[0]) == [("t0", bytes([2] * size))]


def test_each_bucket_gets_its_own_former_file():
    buckets = [tensors_of(9000), tensors_of(100), tensors_of(64, 2000)]
    first = staged(buckets)
    assert inodes(staged(buckets, first.unmapped(()))) == inodes(first)


def test_memory_that_no_bucket_uses_any_more_is_freed():
    def held():
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and module.NAME in os.readlink(link) for link in links)

    before = held()
    large = staged([tensors_of(9000)] * 3)
    assert held() == before + 3
    kept = large.unmapped(())
    del large
    small = StagedFiles(kept)
    del kept
    small.add(tensors_of(100))  # fits none
    assert held() == before + 3, "two of the former files, and its own"
    assert len(small.unmapped(())) == 1
    kept = small.unmapped(())
    del small
    assert held() == before + 1
    del kept
    assert held() == before


def test_a_damaged_tensor_leaves_no_part_of_its_bucket():
    def damaged():
        yield tensors_of(500, value=2)[0]
        raise ValueError

    first = staged([tensors_of(500), tensors_of(500)])
    second = StagedFiles(first.unmapped(()))
    second.add(tensors_of(500, value=3))
    with pytest.raises(ValueError):
        second.add(damaged())
    assert len(second.buckets) == 1
    second.add(tensors_of(500, value=4))
    assert inodes(second) == inodes(first)
    assert [content(bucket)[0][1][0] for bucket in second.buckets] == [3, 4]


def test_several_threads_copy_the_same_bytes(monkeypatch):
    random = np.random.default_rng(0)
    tensors = [(TensorEntry(f"t{i}", "uint8", (size,), size), random.integers(0, 255, size, np.uint8))
               for i, size in enumerate([1, 0, 1000, 63, 64, 65, 4001])]
    monkeypatch.setattr(module, "PIECE", 100)
    monkeypatch.setattr(manifest, "WORTH_IT", 1)
    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(manifest, "_threads", lambda: pool)
        first = staged([tensors_of(*(entry.nbytes for entry, _ in tensors))])
        second = staged([tensors], first.unmapped(()))
    assert inodes(second) == inodes(first)
    assert content(second.buckets[0]) == [(entry.name, bytes(array)) for entry, array in tensors]


def test_an_empty_bucket_has_a_file_too():
    stage = staged([tensors_of(0)])
    assert content(stage.buckets[0]) == [("t0", b"")]


def test_other_mappings_are_not_named():
    stage = staged([tensors_of(10)])
    with open(stage.buckets[0].file.path, "rb") as file, open(os.memfd_create("other"), "r+b") as other:
        other.truncate(10)
        mine, theirs = mmap.mmap(file.fileno(), 10, prot=mmap.PROT_READ), mmap.mmap(other.fileno(), 10)
        assert mapped_files() == inodes(stage)
        mine.close()
        assert mapped_files() == [] and len(theirs) == 10
