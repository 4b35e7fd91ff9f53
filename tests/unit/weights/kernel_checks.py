"""The Triton kernel of fingerprints gives the digests of the plain passes. It runs in Triton's interpreter, which must
be on before anything imports Triton: `test_fingerprint_on_gpu` runs these checks in a process of their own."""

import pytest
import torch

from rlhf_ray.records import TensorEntry
from rlhf_ray.weights import fingerprint as module
from rlhf_ray.weights import fingerprint_on_gpu
from rlhf_ray.weights.fingerprint import fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]
CONSTANTS = (module.GOLDEN, module.FIRST, module.SECOND)
FAR = 2**32
"""A word's place that does not fit into 32 bits: 32 GiB into a tensor."""


@pytest.fixture
def kernel(monkeypatch):
    """Digests by the kernel, in blocks that seldom divide a tensor."""
    monkeypatch.setattr(fingerprint_on_gpu, "BLOCK", 16)

    def of(tensor):
        with monkeypatch.context() as patched:
            patched.setattr(module, "_weighted_sums", lambda words: fingerprint_on_gpu.weighted_sums(
                words, module.SEEDS, CONSTANTS))
            return digest(tensor)

    return of


def digest(tensor):
    return fingerprint(TensorEntry("w", str(tensor.dtype), tuple(tensor.shape), tensor.nbytes), tensor)


def random_tensor(shape, dtype):
    numbers = 100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (2,), (5, 13), (16, 8), (3, 128), (129,)], ids=str)
def test_the_digest_is_that_of_the_plain_passes(kernel, shape, dtype):
    tensor = random_tensor(shape, dtype)
    assert kernel(tensor) == digest(tensor)


def test_a_slice_of_a_packed_buffer_and_a_transposed_tensor_may_lie_anywhere(kernel):
    whole = random_tensor((64, 9), torch.bfloat16)
    for tensor in (whole.view(-1)[3:-1], whole.view(-1)[1:65], whole[5:, 2:7], whole.T):
        assert kernel(tensor) == digest(tensor.clone())


def test_extreme_words_wrap_around(kernel):
    words = torch.tensor([2**63 - 1, -(2**63), -1, 1, 0] * 10)
    assert kernel(words) == digest(words)


def test_every_word_counts(kernel):
    words = torch.arange(50)
    seen = {kernel(words)}
    for place in range(len(words)):
        changed = words.clone()
        changed[place] += 1
        seen.add(kernel(changed))
    assert len(seen) == 51


def test_places_beyond_32_bits_are_counted_on(monkeypatch, tmp_path):
    """The last program alone runs, on a file without the words before."""
    from triton.runtime.interpreter import interpreter_builder

    block, last = fingerprint_on_gpu.BLOCK, FAR // fingerprint_on_gpu.BLOCK
    words = torch.from_file(str(tmp_path / "sparse"), shared=True, size=FAR + 5, dtype=torch.int64)
    words[FAR:] = torch.tensor([3, -1, 2**62, 5, 7])
    set_size, set_index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_dim", lambda x, y, z: set_size(last + x, y, z))
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_index(last + x, y, z))
    sums = torch.zeros(2, last + 1, dtype=torch.int64)
    fingerprint_on_gpu._weighted_sums[(1,)](words, sums, len(words), *module.SEEDS, *CONSTANTS, block)
    places = torch.arange(FAR + 1, FAR + 6)
    expected = [(words[FAR:] * module._mixed(places + seed)).sum().item() for seed in module.SEEDS]
    assert sums[:, last].tolist() == expected and not sums[:, :last].any()
