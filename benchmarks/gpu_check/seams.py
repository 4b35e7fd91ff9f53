"""Functions with a path of their own on GPUs, each alone: they need torch, numpy, xxhash and psutil."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import Place
from rlhf_ray.algorithms.logprobs import entropy, token_logprobs
from rlhf_ray.models.attention import Kind, attend_in_grids, attend_variable_length, variable_length_kernel
from rlhf_ray.models.packing import Packing
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.fingerprint import fingerprint

VOCABULARY = 128_256
"""Of Llama 3."""
SEED = 0
GB, MIB = 1e9, 2**20


def seconds_of(call: Callable[[], Any], device: str, times: int = 5) -> float:
    """Mean seconds of a call after one that is not counted."""
    call()
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait(device)
    return (time.perf_counter() - began) / times


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def apart(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Heads:
    """One layer's attention."""

    name: str
    queries: int
    keys: int
    size: int = 128
    window: int | None = None


LAYERS = (Heads("as many keys as queries", 16, 16), Heads("grouped heads", 32, 8),
          Heads("grouped heads, a window", 32, 8, window=512), Heads("heads of 64", 14, 2, size=64))
HALF, SINGLE = 1e-2, 1e-5
"""Largest relative difference from float32 in bfloat16, which keeps 8 bits, and in float32."""


def attention(place: Place) -> Iterator[Row]:
    """Packed rows through the variable-length kernel and through grids, both against grids in float32."""
    kernel = variable_length_kernel() if place.gpu else _row_by_row
    if kernel is None or (place.gpu and torch.cuda.get_device_capability() < (8, 0)):
        yield not_run("variable-length attention", f"torch {torch.__version__} has no such kernel with windows, or the "
                                                   "GPU is older than Ampere; learners use grids")
        return
    lengths = np.random.default_rng(SEED).integers(64, 2049, 8) if place.gpu else np.array([9, 33, 4, 21])
    for layer in LAYERS:
        layer = layer if place.gpu else Heads(layer.name, 4, max(1, 4 * layer.keys // layer.queries), 16,
                                              layer.window and 8)
        yield from _compared(place, kernel, layer, Packing.of(lengths, place.device))


def _compared(place: Place, kernel: Callable[..., Tensor], layer: Heads, packing: Packing) -> Iterator[Row]:
    dtype, bound = (torch.bfloat16, HALF) if place.gpu else (torch.float32, SINGLE)
    kind, random = Kind(window=layer.window), torch.Generator().manual_seed(SEED)
    sizes = ((n, layer.size) for n in (layer.queries, layer.keys, layer.keys, layer.queries))
    *inputs, output_gradient = (torch.randn(packing.tokens, *size, generator=random).to(place.device, dtype)
                                for size in sizes)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_variable_length(kernel, packing, q, k, v, kind)

    def grids(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_in_grids(packing, q, k, v, kind)

    exact = _passed(grids, [x.float() for x in inputs], output_gradient.float())
    errors = [apart(one, other) for one, other in zip(_passed(varlen, inputs, output_gradient), exact, strict=True)]
    yield judged(f"variable-length attention, {layer.name}",
                 f"values {errors[0]:.1e}, gradients of q, k, v {', '.join(f'{e:.1e}' for e in errors[1:])}",
                 max(errors) <= bound, f"relative to grids in float32; at most {bound:g}")
    mine, theirs = (seconds_of(partial(_passed, attend, inputs, output_gradient), place.device)
                    for attend in (varlen, grids))
    found = f"{mine * 1e3:.2f} ms, grids {theirs * 1e3:.2f} ms"
    note = f"forward and backward of {packing.tokens:,} tokens in {packing.rows} rows"
    yield (judged(f"its speed, {layer.name}", found, mine <= theirs, note + "; not slower than the grids") if place.gpu
           else Row(f"its speed, {layer.name}", found, note + "; a stand-in for the kernel"))


def _passed(attend: Callable[..., Tensor], inputs: list[Tensor], output_gradient: Tensor) -> list[Tensor]:
    """Values, and gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, output_gradient)]


def _row_by_row(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, _: Tensor, longest: int, __: int, *,
                scale: float | None, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
    """`varlen_attn` without its kernel, for CPUs."""
    place = torch.arange(longest)
    before = longest if window_size[0] < 0 else window_size[0]
    seen = (place <= place[:, None]) & (place >= place[:, None] - before)
    outputs = []
    for first, end in pairwise(starts.tolist()):
        q, k, v = (x[first:end].transpose(0, 1) for x in (query, key, value))
        mask = seen[: end - first, : end - first]
        outputs.append(scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(outputs)


LOST = 3e-4
"""Nats that a log-probability or entropy may be off; bfloat16 logits are given."""


def logprobs(place: Place) -> Iterator[Row]:
    """Log-probabilities and entropies of bfloat16 logits over 128,256 tokens, against float64."""
    tokens = 4096 if place.gpu else 24
    random = torch.Generator().manual_seed(SEED)
    logits = (4 * torch.randn(tokens, VOCABULARY, generator=random)).to(place.device, torch.bfloat16)
    picked = torch.randint(VOCABULARY, (tokens,), generator=random).to(place.device)
    gradient = torch.randn(tokens, generator=random).to(place.device)
    def exact_logprobs(wide: Tensor, rows: slice) -> Tensor:
        return wide.log_softmax(-1).gather(-1, picked[rows, None])[:, 0]

    def exact_entropies(wide: Tensor, _: slice) -> Tensor:
        return torch.special.entr(wide.softmax(-1)).sum(-1)

    yield from _differentiated(place, "log-probabilities", lambda z: token_logprobs(z, picked), exact_logprobs, logits,
                               gradient)
    yield from _differentiated(place, "entropies", entropy, exact_entropies, logits, gradient)


def _differentiated(place: Place, name: str, function: Callable[[Tensor], Tensor],
                    exact: Callable[[Tensor, slice], Tensor], logits: Tensor, gradient: Tensor) -> Iterator[Row]:
    """Values and gradients against those of float64, made some rows at a time; and what is held meanwhile."""
    leaf = logits.detach().requires_grad_()
    before = _peak_from_here(place)
    values = function(leaf)
    (found,) = torch.autograd.grad(values, leaf, gradient)
    held = _peak(place) - before
    lost, squares = 0.0, [0.0, 0.0]
    for rows in (slice(i, i + 64) for i in range(0, len(logits), 64)):
        wide = logits[rows].double().requires_grad_()
        expected = exact(wide, rows)
        (true,) = torch.autograd.grad(expected, wide, gradient[rows].double())
        lost = max(lost, float((values[rows].detach() - expected.detach()).abs().max()))
        squares = [squares[0] + float((found[rows].double() - true).square().sum()),
                   squares[1] + float(true.square().sum())]
    off = (squares[0] / squares[1]) ** 0.5
    yield judged(f"{name} over {VOCABULARY:,} logits", f"{lost:.1e} nats, gradient {off:.1e}",
                 lost <= LOST and off <= HALF,
                 f"largest difference from float64, at most {LOST:g}; the gradient's is relative, at most {HALF:g}")
    if not place.gpu:
        yield not_run(f"memory of {name}", "CUDA's allocator counts it")
        return
    allowed = 1.05 * logits.nbytes
    yield judged(f"memory of {name}", f"{held / MIB:,.0f} MiB", held <= allowed,
                 f"beyond logits of {logits.nbytes / MIB:,.0f} MiB; at most their gradient, {allowed / MIB:,.0f} MiB")
    seconds = seconds_of(lambda: torch.autograd.grad(function(leaf), leaf, gradient), place.device)
    yield Row(f"speed of {name}", f"{3 * logits.nbytes / seconds / 1e12:.2f} TB/s", f"forward and backward in "
              f"{seconds * 1e3:.2f} ms; the logits read twice and their gradient written")


def _peak_from_here(place: Place) -> int:
    if not place.gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(place: Place) -> int:
    return torch.cuda.max_memory_allocated() if place.gpu else 0


def fingerprints(place: Place) -> Iterator[Row]:
    """Digests of tensors on the device and in main memory, and their rate."""
    random = torch.Generator().manual_seed(SEED)
    base = torch.randn(5000, 257, generator=random)
    tensors = {"float32": base, "bfloat16": base.bfloat16(), "a slice": base[1:, 3:],
               "int8": base.to(torch.int8)[:, :5]}
    for name, tensor in tensors.items():
        entry = _entry(tensor)
        here, there = fingerprint(entry, tensor.contiguous()), fingerprint(entry, tensor.to(place.device))
        damaged = tensor.to(place.device).clone()
        damaged[7, 2] += 1
        yield judged(f"digest of {name}", there[:12], here == there != fingerprint(entry, damaged),
                     "that of main memory; another one after one number changed")
    large = torch.zeros(2**30 if place.gpu else 2**22, dtype=torch.bfloat16, device=place.device)
    rate = large.nbytes / seconds_of(lambda: fingerprint(_entry(large), large), place.device, 3)
    yield Row("digests", f"{rate / GB:,.1f} GB/s", f"of {large.nbytes / MIB:,.0f} MiB in bfloat16")


def _entry(tensor: Tensor) -> TensorEntry:
    return TensorEntry("w", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)


PUBLICATIONS, BUCKET = 8, 2**26
"""Buckets of so many numbers in float32: 256 MiB."""


def ipc(place: Place) -> Iterator[Row]:
    """Another process reads buckets by handle; afterwards the GPU has as much free memory as before."""
    if not place.gpu:
        yield not_run("memory read by handle", "CUDA's handles need a GPU")
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(theirs,), daemon=True)
    reader.start()
    _offered(ours, 0)  # the reader's context stays
    before, right = torch.cuda.mem_get_info()[0], True
    for number in range(1, PUBLICATIONS + 1):
        right = _offered(ours, number) and right
    lost = before - torch.cuda.mem_get_info()[0]
    yield judged("memory read by handle", f"{PUBLICATIONS} buckets", right, "the reader's sum is the writer's")
    yield judged("memory afterwards", f"{lost / MIB:,.0f} MiB less", lost <= 64 * MIB,
                 f"free memory before and after {PUBLICATIONS} buckets of {4 * BUCKET / MIB:.0f} MiB; at most 64 less")
    ours.send(None)
    reader.join(30)


def _offered(reader: Connection, number: int) -> bool:
    """Whether the reader finds the bucket's sum; the bucket is freed."""
    from torch.multiprocessing.reductions import reduce_tensor

    from rlhf_ray.weights.direct_transport import plain_handle

    bucket = torch.full((BUCKET,), float(number), device="cuda")
    reader.send(plain_handle(reduce_tensor(bucket)[1]))
    right = reader.poll(120) and reader.recv() == float(number) * BUCKET
    del bucket
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return right


def _read(writer: Connection) -> None:
    """In another process: sums of what handles lead to, until there is none."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from rlhf_ray.weights.direct_transport import handle_arguments

    while (handle := writer.recv()) is not None:
        bucket = rebuild_cuda_tensor(*handle_arguments(handle))
        total = float(bucket.double().sum())
        del bucket
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        writer.send(total)
