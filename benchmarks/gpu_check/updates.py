"""Updates with different settings side by side in one process, and what else a learner's time goes to, each alone."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.learner import GB, GIB, HALF, apart, rate, seconds_of_one, too_small
from benchmarks.gpu_check.profiles import profiled
from benchmarks.gpu_check.random_policy import (
    B1,
    B3,
    B8,
    SEED,
    TINY,
    RandomPolicy,
    Setting,
    Size,
    experience,
    hardware,
    optimizer_step,
    random_model,
)
from benchmarks.gpu_check.rows import Message, Row, judged, not_run
from benchmarks.gpu_check.runner import Measurement, Place, in_turn
from benchmarks.gpu_check.seams import LAYERS, Heads, seconds_of
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.models.attention import Kind, attend_in_grids, attend_variable_length, variable_length_kernel
from rlhf_ray.models.packed_model import Chunks
from rlhf_ray.models.packing import Packing
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.fingerprint import fingerprint
from rlhf_ray.weights.host_buffers import HostBuffers, bytes_needed
from rlhf_ray.weights.manifest import as_announced, digest_of

TIMES = 3
"""Updates after the first, of which the fastest counts."""
APART = 0.15
"""Largest relative difference of the gradients of two settings in bfloat16. Of a random model they are 6e-2 from those
in float32 (`learner:gradients`), whether layers are compiled or not, so two settings may be 8e-2 apart."""
SAMPLED = 2**15
"""Numbers of a tensor whose gradients are compared."""
KEPT = 0.25
"""Share of the GPU's memory that may remain occupied after a measurement."""
IN_CHUNKS = Chunks(elements=2**27)
"""Logits of at most 2^27 entries at a time."""
EAGER = {**HALF, "compile_layers": False}
COMPILED = {**HALF, "compile_layers": True}


@dataclass(frozen=True)
class Variant:
    """An update with some settings."""

    name: str
    seconds: float
    """What it is expected to take, its start included."""
    size: Size
    fields: Mapping[str, Any] = field(default_factory=dict)
    chunks: Chunks | None = None
    """Of logits; None for the learner's own, which is one where activations are kept."""
    liger: bool = False
    profiled: bool = False
    by_layer: bool = True
    """Whether ZeRO-3 gathers a layer as one, not each of its modules."""
    compared: bool = True
    """Whether its gradients are those of the size's first variant."""


def settings(place: Place) -> Iterator[Message]:
    """All measurements, most valuable first."""
    size = B1 if place.gpu else TINY
    references: dict[tuple[int, bool], dict[str, Tensor]] = {}
    updates = [Measurement(v.name, v.seconds, partial(_update, place, v, references)) for v in variants(place.gpu)]
    machine = Measurement("this machine", 4, partial(_machine, place))
    others = [Measurement("1B: parts of a publication", 12, partial(_publication, place, Setting(size, EAGER))),
              Measurement("attention", 4, partial(_attention, place)),
              Measurement("1B: a plain loop", 8, partial(_plain_update, place, Setting(size)))]
    yield from in_turn(place, [machine, *updates[:5], *others[:2], *updates[5:10], others[2], *updates[10:]],
                       partial(_clean, place))


def variants(gpu: bool) -> list[Variant]:
    """Updates, most valuable first. In a rehearsal all models are one, so each setting occurs once."""
    small, large, middle = (B1, _shortened(B8), B3) if gpu else (TINY, TINY, TINY)
    half = {"gradient_checkpointing": 0.5}
    recomputed = {"gradient_checkpointing": True}
    sharded = {**HALF, "zero_stage": 3}
    adapters = {**recomputed, "lora": LoRAConfig()}
    every = [
        Variant("1B: layers as they are, logits in chunks", 20, small, EAGER, IN_CHUNKS),
        Variant("1B: one chunk of logits", 7, small, EAGER),
        Variant("1B: compiled layers, one chunk", 30, small, COMPILED, profiled=True),
        Variant("8B shapes: layers as they are", 9, large, EAGER),
        Variant("8B shapes: compiled layers", 35, large, COMPILED, profiled=True),
        Variant("1B: compiled layers, micro-batches of 16k", 12, _wider(small, 2), COMPILED),
        Variant("8B shapes: compiled layers, micro-batches of 16k", 20, _wider(large, 2), COMPILED),
        Variant("8B shapes: compiled layers, recomputed", 20, large, COMPILED | recomputed),
        Variant("1B: ZeRO-3, gathered module by module", 14, small, sharded, by_layer=False, compared=False),
        Variant("1B: ZeRO-3, gathered layer by layer", 12, small, sharded, compared=False),
        Variant("8B shapes: adapters, compiled layers, recomputed", 60, large, COMPILED | adapters),
        Variant("1B: compiled layers, half of them recomputed", 14, small, COMPILED | half),
        Variant("1B: Liger", 8, small, EAGER, liger=True),
        Variant("1B: compiled layers, micro-batches of 32k", 10, _wider(small, 4), COMPILED),
        Variant("1B: compiled layers, recomputed", 14, small, COMPILED | recomputed),
        Variant("3B: compiled layers", 30, middle, COMPILED),
        Variant("8B shapes: adapters, recomputed", 10, large, EAGER | adapters),
        Variant("1B: compiled layers, logits in chunks", 10, small, COMPILED, IN_CHUNKS),
    ]
    chosen: list[Variant] = []
    for one in every:
        if gpu or not any(replace(one, name=o.name, seconds=o.seconds, profiled=o.profiled) == o for o in chosen):
            chosen.append(one)
    return chosen


def _shortened(size: Size) -> Size:
    """With as many layers as this GPU has room for."""
    device = hardware()
    return replace(size, layers=12 if device and device.memory_bytes > 100e9 else 8)


def _wider(size: Size, factor: int) -> Size:
    return replace(size, micro_batch=factor * size.micro_batch)


def _clean(place: Place) -> None:
    """Free what a learner leaves in cycles, and what compiled code refers to. DeepSpeed holds the modules of ZeRO-3.

    Raises:
        RuntimeError: CUDA's context is damaged, or much memory remains occupied.
    """
    from torch._dynamo.utils import counters

    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    if not place.gpu:
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    _, total = torch.cuda.mem_get_info()
    print(f"{held / GIB:.2f} GiB are allocated", flush=True)
    if held > KEPT * total:
        raise RuntimeError(f"{held / GIB:.1f} GiB remain allocated")


def _update(place: Place, variant: Variant, references: dict[tuple[int, bool], dict[str, Tensor]]) -> Iterator[Row]:
    """The fastest of some updates, with the first one's seconds, the memory, and whether it computes the same
    gradients."""
    if variant.liger and (not place.gpu or find_spec("liger_kernel") is None):
        yield not_run(variant.name, "liger_kernel is not installed" if place.gpu else "Liger's kernels need a GPU")
        return
    setting = Setting(variant.size, variant.fields, variant.chunks, variant.liger)
    if (short := too_small(place, setting)) is not None:
        yield replace(short, what=variant.name)
        return
    with _llama_restored(), _gathered(variant.by_layer), nullcontext() if place.gpu else _traced_alone():
        yield from _updates(place, variant, setting, references)


def _updates(place: Place, variant: Variant, setting: Setting, references: dict[tuple[int, bool], dict[str, Tensor]]
             ) -> Iterator[Row]:
    began = time.perf_counter()
    before = torch.cuda.memory_allocated() if place.gpu else 0  # DeepSpeed holds the weights of an earlier ZeRO-3
    learner = setting.start(place)
    start = time.perf_counter() - began
    of_start = _graphs()
    rows = experience(setting.size)
    first = seconds_of_one(lambda: optimizer_step(learner, rows, 1))
    notes = [f"started in {start:.1f} s, first update {first:.1f} s"]
    graphs = _graphs()
    if learner.engine.compiled:
        notes.append(learner.engine.compiled.note)
        notes.append(f"{of_start} graphs at the start, {graphs - of_start} in the first update")
    right = True
    if variant.compared:
        off = _difference(learner, references, (setting.size.hidden, "lora" in setting.fields))
        right = off <= APART
        notes.append(f"gradients {off:.1e} from the first variant's, at most {APART:g}")
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [optimizer_step(learner, rows, 2 + i) for i in range(TIMES)]
    notes += _memory(place, setting, before)
    if graphs:
        notes.append(f"{_graphs() - graphs} graphs later, {_breaks()} breaks")
    notes.append(f"updates of {', '.join(f'{s:.3f}' for s in seconds)} s")
    found = f"{min(seconds):.3f} s, {rate(place, setting, min(seconds))[0]}"
    yield (judged(variant.name, found, right, "; ".join(notes)) if variant.compared
           else Row(variant.name, found, "; ".join(notes)))
    if variant.profiled:
        yield profiled(place, variant.name, lambda: optimizer_step(learner, rows, 2 + TIMES))


def _llama_restored() -> Any:
    """Undoes what Liger changes in transformers' module."""
    from transformers.models.llama import modeling_llama

    return mock.patch.dict(vars(modeling_llama))


def _traced_alone() -> Any:
    """In a rehearsal: graphs are traced, and no code is compiled for them, which takes minutes on a CPU."""
    compiled = torch.nn.Module.compile

    def traced(module: torch.nn.Module, dynamic: bool, **_: Any) -> None:
        compiled(module, dynamic=dynamic, backend="aot_eager")

    return mock.patch.object(torch.nn.Module, "compile", traced)


def _gathered(by_layer: bool) -> Any:
    """Whether ZeRO-3 gathers layers as ours does, or as DeepSpeed does by itself."""
    from rlhf_ray.engine import deepspeed_engine

    if by_layer:
        return nullcontext()
    return mock.patch.object(deepspeed_engine, "gather_together", lambda *_: None)


def _graphs() -> int:
    """Graphs that were compiled in this process since `torch._dynamo.reset`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _breaks() -> int:
    from torch._dynamo.utils import counters

    return len(counters["graph_break"])


def _memory(place: Place, setting: Setting, before: int) -> list[str]:
    """The most that was held in the updates besides what was held before, in bytes, against the plan."""
    if not place.gpu:
        return []
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    planned = setting.plan(place).device_bytes
    held = torch.cuda.max_memory_allocated() - before + context
    return [f"{held / GIB:.1f} GiB, planned {planned / GIB:.1f} ({held / planned - 1:+.0%})"]


def _difference(learner: RandomPolicy, references: dict[tuple[int, bool], dict[str, Tensor]], model: tuple[int, bool]
                ) -> float:
    """How far the gradients of the first update, a tenth of which is AdamW's first moment, are from those of the first
    variant of a model."""
    states = learner.engine.engine.optimizer.state
    found = {}
    for name, parameter in learner.engine.module.named_parameters():
        if parameter.requires_grad:
            sample = states[parameter]["exp_avg"].flatten()[:: 1 + parameter.numel() // SAMPLED]
            found[name] = sample.to("cpu", torch.float32, copy=True)
    return apart(found, references.setdefault(model, found))


def _machine(place: Place) -> Iterator[Row]:
    """What this machine reaches, to compare with."""
    n, half = (8192, torch.bfloat16) if place.gpu else (256, torch.float32)
    a, b = (torch.randn(n, n, device=place.device, dtype=half) for _ in range(2))
    product = seconds_of(lambda: a @ b, place.device, 20)
    yield Row("matrix product of 8,192", f"{2 * n**3 / product / 1e12:,.3g} TFLOP/s")
    one, other = (torch.empty(2**31 if place.gpu else 2**20, dtype=torch.uint8, device=place.device) for _ in range(2))
    copied = seconds_of(lambda: one.copy_(other), place.device, 10)
    yield Row("copy on the device", f"{2 * one.nbytes / copied / 1e12:.3g} TB/s", "bytes read and written")
    if place.gpu:
        yield Row("copy to pinned memory", f"{_to_pinned(one[: 2**28]):.1f} GB/s")


def _to_pinned(tensor: Tensor) -> float:
    """GB/s."""
    pinned = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
    return tensor.nbytes / seconds_of(lambda: pinned.copy_(tensor, non_blocking=True), "cuda", 3) / GB


def _publication(place: Place, setting: Setting) -> Iterator[Row]:
    """Whole publications, and their parts."""
    learner = setting.start(place)
    yield from _whole_publications(learner)
    yield from _parts_of_a_publication(place, learner)


def _whole_publications(learner: RandomPolicy) -> Iterator[Row]:
    """In buckets of two sizes."""
    for mib in (64, 256):
        plan = learner.plan_weights(mib * 2**20, [])

        def all_buckets(buckets: int = plan.whole.buckets) -> None:
            for index in range(buckets):
                learner.weight_bucket(1, index)

        first = seconds_of_one(all_buckets)
        seconds = min(seconds_of_one(all_buckets) for _ in range(2))
        nbytes = plan.whole.nbytes
        yield Row(f"publication in buckets of {mib} MiB", f"{nbytes / seconds / GB:.2f} GB/s",
                  f"{nbytes / 1e6:,.0f} MB in {seconds:.2f} s, {first:.2f} s the first time; the learner's side")


def _parts_of_a_publication(place: Place, learner: RandomPolicy) -> Iterator[Row]:
    """Each on the bytes of all tensors, as one bucket."""
    model = learner.published_tensors()
    entries = [TensorEntry(name, dtype, shape, int(np.prod(shape)) * getattr(torch, dtype).itemsize)
               for name, shape, dtype in model.specs()]
    nbytes = sum(entry.nbytes for entry in entries)

    def ready() -> dict[str, Tensor]:
        gathered = model.gather([entry.name for entry in entries])
        assert gathered is not None
        return as_announced(entries, gathered)

    tensors = ready()
    buffers = HostBuffers(bytes_needed(entries), pinned=place.gpu)

    def copied() -> list[np.ndarray]:
        arrays, waits = buffers.copy(entries, tensors)
        for wait in waits:
            wait()
        return arrays

    arrays = copied()
    threads = min(16, os.cpu_count() or 1)

    def digests(pool: ThreadPoolExecutor) -> None:
        list(pool.map(digest_of, entries, arrays))

    def fingerprints() -> None:
        for entry in entries:
            fingerprint(entry, tensors[entry.name])

    parts: dict[str, Callable[[], Any]] = {
        "gather and cast": ready, "fingerprints, tensor by tensor": fingerprints, "copies to main memory": copied}
    for name, call in parts.items():
        seconds = seconds_of(call, place.device, 2)
        yield Row(f"publication: {name}", f"{nbytes / seconds / GB:.1f} GB/s", f"{1e3 * seconds:.1f} ms")
    for count in sorted({1, 4, threads}):
        with ThreadPoolExecutor(count) as pool:
            seconds = seconds_of(partial(digests, pool), "cpu", 1)
        yield Row(f"publication: XXH3 by {count} threads", f"{nbytes / seconds / GB:.1f} GB/s",
                  f"{1e3 * seconds:.1f} ms")
    other = entries[1]
    same = fingerprint(other, tensors[other.name]) == fingerprint(other, tensors[other.name].cpu())
    yield judged("publication: fingerprints here and on the CPU", "the same" if same else "others", same, other.name)
    large = max(entries, key=lambda entry: entry.nbytes)
    seconds = seconds_of(lambda: fingerprint(large, tensors[large.name]), place.device, 3)
    yield Row("publication: fingerprint of the largest tensor", f"{large.nbytes / seconds / GB:,.1f} GB/s",
              f"{large.nbytes / 1e6:,.0f} MB")


def _attention(place: Place) -> Iterator[Row]:
    """Forward and backward passes over rows of some lengths."""
    kernel = variable_length_kernel() if place.gpu else None
    heads = (Heads("heads of 64", 32, 8, 64), LAYERS[1]) if place.gpu else (Heads("heads of 16", 4, 2, 16),)
    for layer in heads:
        for length, count in ((1024, 32), (8192, 4), (32768, 1)) if place.gpu else ((16, 4), (64, 1)):
            packing = Packing.of(np.full(count, length), place.device)
            sizes = [(packing.tokens, n, layer.size) for n in (layer.queries, layer.keys, layer.keys, layer.queries)]
            random = torch.Generator(place.device).manual_seed(SEED)
            *inputs, gradient = (torch.randn(size, device=place.device, generator=random,
                                             dtype=torch.bfloat16 if place.gpu else torch.float32) for size in sizes)
            leaves = [x.requires_grad_() for x in inputs]

            def passes(leaves: list[Tensor] = leaves, gradient: Tensor = gradient, packing: Packing = packing) -> None:
                q, k, v = leaves
                out = (attend_variable_length(kernel, packing, q, k, v, Kind()) if kernel
                       else attend_in_grids(packing, q, k, v, Kind()))
                torch.autograd.grad(out, leaves, gradient)

            seconds = seconds_of(passes, place.device, 3)
            flops = 3.5 * 2 * packing.tokens * length * layer.queries * layer.size  # of causal pairs: half of all
            yield Row(f"attention, {count} rows of {length:,} tokens, {layer.name} of {layer.size}",
                      f"{flops / seconds / 1e12:.3g} TFLOP/s", f"forward and backward in {1e3 * seconds:.2f} ms; "
                      f"{layer.queries} heads of queries, {layer.keys} of keys")


def _plain_update(place: Place, setting: Setting) -> Iterator[Row]:
    """The update of the same model on as many tokens, without anything of this project."""
    from torch.nn.functional import cross_entropy

    size = setting.size
    whole = setting.model(place).model_copy(update={"dtype": "float32"})
    model = random_model(whole, place.device, attn_implementation="sdpa")
    tokens = torch.as_tensor(experience(size).tokens, dtype=torch.int64, device=place.device).view(size.rows, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for part in tokens.split(max(1, size.micro_batch // size.length)):
            with torch.autocast(place.device, torch.bfloat16):
                states = model.model(part).last_hidden_state[:, size.prompt - 1 : -1]
                loss = cross_entropy(model.lm_head(states).flatten(0, 1), part[:, size.prompt :].flatten())
            (loss * len(part) / size.rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = min(seconds_of_one(step) for _ in range(1 + TIMES))
    yield Row("1B: a plain loop", f"{seconds:.3f} s, {rate(place, setting, seconds)[0]}",
              "transformers' Llama in autocast, whole logits, torch's AdamW")
