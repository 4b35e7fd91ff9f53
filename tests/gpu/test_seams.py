"""The seams that unit tests show on the CPU, on a GPU."""

import multiprocessing

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlhf_ray.models.float32_head import Float32Head
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights import fingerprint as fingerprints
from rlhf_ray.weights.direct_transport import handle_arguments, plain_handle
from rlhf_ray.weights.fingerprint import fingerprint
from rlhf_ray.weights.publication import SealedBuckets

pytestmark = pytest.mark.gpu


def entry_of(tensor):
    return TensorEntry("w", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_has_the_same_fingerprint_on_every_device(gpu, dtype):
    tensor = torch.randn(1031, 257).to(dtype)
    assert fingerprint(entry_of(tensor), tensor) == fingerprint(entry_of(tensor), tensor.to(gpu))


def test_a_tensor_of_more_bytes_than_32_bits_count_has_the_fingerprint_of_the_plain_passes(gpu):
    from rlhf_ray.weights import fingerprint_on_gpu

    words = torch.randint(-(2**63), 2**63 - 1, (2**29 + 3,), device=gpu)
    sums = fingerprint_on_gpu.weighted_sums(words, fingerprints.SEEDS,
                                            (fingerprints.GOLDEN, fingerprints.FIRST, fingerprints.SECOND))
    assert sums.tolist() == fingerprints._weighted_sums(words).tolist()


def test_a_head_in_float32_has_the_logits_and_gradients_of_float64(gpu):
    """Without a copy of the weight in float32; gradients but for the rounding of those of the logits."""
    head = torch.nn.Linear(512, 32_000, bias=False, device=gpu)
    states = torch.randn(300, 512, device=gpu, requires_grad=True)
    upstream = torch.randn(300, 32_000, device=gpu)
    x, w = states.detach().bfloat16().double(), head.weight.detach().bfloat16().double()
    head.__class__ = Float32Head
    torch.mm(states.bfloat16(), states.bfloat16().t(), out_dtype=torch.float32)  # cuBLAS keeps its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        logits = head(states)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes + 0.6 * head.weight.nbytes
    logits.backward(upstream)
    assert (logits - x @ w.t()).abs().max() < 1e-4
    for got, expected in ((states.grad, upstream.double() @ w), (head.weight.grad, upstream.double().t() @ x)):
        assert (got - expected).abs().max() < 2**-8 * expected.abs().max()


def test_buckets_of_a_gpu_are_those_of_main_memory(gpu):
    """Tensors are freed, and their memory is used again, while they are copied."""
    random = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(1 << 20, generator=random) for i in range(24)}
    specs = [(name, (1 << 20,), "bfloat16") for name in tensors]
    here = SealedBuckets(specs, tensors, 1 << 23, lambda names: tensors)
    there = SealedBuckets(specs, tensors, 1 << 23, lambda names: {name: tensors[name].to(gpu) for name in names})
    before = None
    for index in [*range(here.plan.whole.buckets)] * 2:
        expected, bucket = here.bucket(1, index), there.bucket(1, index)
        assert bucket.checksum == expected.checksum
        for sent, arrays in filter(None, (before, (expected, bucket))):
            assert all(np.array_equal(*pair) for pair in zip(sent.arrays, arrays.arrays, strict=True))
        before = expected, bucket


def read(handle, answers):
    """In another process: the sum of what a handle leads to."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    answers.put(float(rebuild_cuda_tensor(*handle_arguments(handle)).sum()))


def test_another_process_reads_memory_by_a_plain_handle(gpu):
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.arange(1000.0, device=gpu)
    _, arguments = reduce_tensor(tensor)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    reader = context.Process(target=read, args=(plain_handle(arguments), answers))
    reader.start()
    assert answers.get(timeout=120) == float(tensor.sum())
    reader.join(30)


def test_packed_attention_is_the_rows_own_in_bfloat16(gpu):
    from rlhf_ray.models.attention import packed_attention
    from rlhf_ray.models.packing import Packing

    lengths = [5, 130, 64]
    q, k, v = (torch.randn(1, 4, sum(lengths), 64, device=gpu, dtype=torch.bfloat16) for _ in range(3))
    packed, _ = packed_attention(torch.nn.Identity(), q, k, v, None, packing=Packing.of(np.asarray(lengths), gpu))
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = F.scaled_dot_product_attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], is_causal=True)
        assert torch.allclose(packed[:, rows].transpose(1, 2).float(), alone.float(), atol=2e-2)
        start += length
