"""vLLM by itself, in one process and without Ray: how long it takes to start, how fast it decodes, what sleep gives
back. Models have random weights that no file holds. vLLM's allocator for sleep allows one engine in a process."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu_check.profiles import profiled
from benchmarks.gpu_check.rows import Row, judged, not_run
from benchmarks.gpu_check.runner import Place

PROMPT = 128
"""Tokens."""
RESPONSE = 256
"""Tokens."""
SEQUENCES = (256, 512)
"""How many are decoded at a time."""
CAPTURED = [1, 8, 64, 128, 256, 384, 512]
"""Batch sizes with a CUDA graph: fewer than vLLM captures by itself, to save time."""
UTILIZATION = 0.85
GIB, SEED = 2**30, 0
STAGES = {
    "vllm.v1.worker.gpu_worker.Worker": (
        "init_device", "load_model", "determine_available_memory", "initialize_from_config",
        "compile_or_warm_up_model"),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("capture_model",),
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": ("capture_model",),
}
"""Methods whose time is a part of an engine's start; `capture_model` is within `compile_or_warm_up_model`."""


@dataclass(frozen=True)
class Engine:
    """One engine."""

    name: str
    large: bool
    offloads_graphs: bool
    """Whether sleep gives back the memory of CUDA graphs, too."""


def large(place: Place) -> Iterator[Row]:
    """8 billion weights."""
    yield from _engine(place, Engine("8B", large=True, offloads_graphs=True))


def small(place: Place) -> Iterator[Row]:
    """1 billion weights, and what a decoding step's time goes to."""
    yield from _engine(place, Engine("1B", large=False, offloads_graphs=False))


def offloaded(place: Place) -> Iterator[Row]:
    """Sleep of the same, with CUDA graphs that give their memory back."""
    yield from _engine(place, Engine("1B, graphs offloaded", large=False, offloads_graphs=True), decodes=False)


def _imported() -> Iterator[Row]:
    began = time.perf_counter()
    import torch

    torch_s = time.perf_counter() - began
    import vllm

    _register()
    seconds = time.perf_counter() - began
    yield Row("import of vLLM", f"{seconds:.1f} s", f"{torch_s:.1f} s of it torch {torch.__version__}; "
                                                   f"vLLM {vllm.__version__}")


def _register() -> None:
    """Name the model's class, which vLLM would otherwise inspect in another process."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)


def _engine(place: Place, engine: Engine, decodes: bool = True) -> Iterator[Row]:
    """Import, start, speeds and sleep of one."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if find_spec("flashinfer") is None:
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if not place.gpu:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    yield from _imported()
    from benchmarks.gpu_check.random_policy import B1, B8, Size

    tiny = Size(128, 2, 2, 2, 384, vocabulary=1280)
    size = (B8 if engine.large else B1) if place.gpu else tiny
    with _timed() as parts:
        began = time.perf_counter()
        llm = _started(place, engine, size)
        seconds = time.perf_counter() - began
    note = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    runner = "new" if llm.llm_engine.vllm_config.use_v2_model_runner else "older"
    yield Row(f"vLLM, {engine.name}: start", f"{seconds:.1f} s",
              f"{note}; {len(CAPTURED)} batch sizes captured; the {runner} model runner")
    if decodes:
        for count in SEQUENCES if place.gpu else (4,):
            yield _speed(place, engine, size, llm, count)
        yield from _parts_of_a_step(place, engine, size, llm)
    yield from _sleep(place, engine, llm)


def _started(place: Place, engine: Engine, size: Any) -> Any:
    """A `vllm.LLM`, without torch.compile, which vLLM's pinned torch alone is sure to have as it needs it."""
    from vllm import LLM

    entries = size.entries() | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    (place.directory / "config.json").write_text(json.dumps(entries))
    if place.gpu:
        own: dict[str, Any] = {
            "dtype": "bfloat16", "gpu_memory_utilization": UTILIZATION, "max_num_batched_tokens": 8192,
            "enable_sleep_mode": _sleeps(), "sleep_mode_offload_cudagraph": engine.offloads_graphs and _sleeps(),
            "compilation_config": {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}}
    else:
        own = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20,
               "enable_chunked_prefill": False}
    return LLM(model=str(place.directory), load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
               max_model_len=PROMPT + RESPONSE, max_num_seqs=max(SEQUENCES) if place.gpu else 8, seed=SEED,
               enable_prefix_caching=False, logprobs_mode="processed_logprobs", disable_log_stats=True, **own)


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Seconds of each method of `STAGES` that is called inside."""
    seconds: Counter[str] = Counter()

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                seconds[method.__name__] += time.perf_counter() - began  # type: ignore[assignment]
        return call

    with ExitStack() as stack:
        for path, names in STAGES.items():
            module, _, name = path.rpartition(".")
            kind = getattr(import_module(module), name)
            for method in names:
                stack.enter_context(mock.patch.object(kind, method, timed(vars(kind)[method])))
        yield seconds  # type: ignore[misc]


def _drawn(llm: Any, count: int, tokens: int, vocabulary: int, **changed: Any) -> tuple[list[Any], float]:
    """Responses to random prompts, and seconds. As for a learner, each has a seed and log-probabilities."""
    from vllm import SamplingParams

    random = np.random.default_rng(SEED).integers(5, vocabulary, (count, PROMPT))
    prompts = [{"prompt_token_ids": row.tolist()} for row in random]
    usual = {"temperature": 1.0, "logprobs": 0, "flat_logprobs": True}
    parameters = [SamplingParams(**{**usual, "seed": row, **changed}, max_tokens=tokens, ignore_eos=True,
                                 detokenize=False) for row in range(count)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - began
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def _speed(place: Place, engine: Engine, size: Any, llm: Any, count: int) -> Row:
    """Tokens a second, and a decoding step over the time in which its bytes could be read."""
    from benchmarks.gpu_check.random_policy import hardware

    response = RESPONSE if place.gpu else 16
    _drawn(llm, count, 2, size.vocabulary)
    _, first = _drawn(llm, count, 1, size.vocabulary)
    tokens, seconds = _drawn(llm, count, response, size.vocabulary)
    step = (seconds - first) / (response - 1)
    made = sum(map(len, tokens))
    note = f"{made:,} tokens, prompts of {PROMPT} in {first:.2f} s; a step {1e3 * step:.2f} ms"
    if (device := hardware() if place.gpu else None) is not None:
        width = size.hidden // size.heads
        layer = size.hidden * (2 * size.hidden + 2 * size.kv_heads * width + 3 * size.intermediate)
        weights = 2 * (size.layers * layer + size.vocabulary * size.hidden)
        cache = 2 * 2 * size.layers * size.kv_heads * width * count * (PROMPT + response / 2)
        floor = (weights + cache) / device.memory_bandwidth
        note += (f", {step / floor:.2f} times the {1e3 * floor:.2f} ms in which {weights / 1e9:.1f} GB of weights and "
                 f"{cache / 1e9:.1f} GB of cache can be read")
    return Row(f"vLLM, {engine.name}: {count} sequences", f"{made / seconds:,.0f} tokens/s", note)


def _parts_of_a_step(place: Place, engine: Engine, size: Any, llm: Any) -> Iterator[Row]:
    """What log-probabilities and seeds add to a decoding step, and its kernels."""
    count, steps = (SEQUENCES[0], 64) if place.gpu else (4, 8)
    without: dict[str, dict[str, Any]] = {
        "as for a learner": {}, "without log-probabilities": {"logprobs": None, "flat_logprobs": False},
        "without them and without seeds": {"logprobs": None, "flat_logprobs": False, "seed": None},
        "greedy, without them": {"logprobs": None, "flat_logprobs": False, "seed": None, "temperature": 0.0}}
    for name, changed in without.items():
        _drawn(llm, count, 2, size.vocabulary, **changed)
        first, last = (_drawn(llm, count, tokens, size.vocabulary, **changed)[1] for tokens in (1, 1 + steps))
        yield Row(f"vLLM, {engine.name}: a step of {count} sequences, {name}", f"{1e3 * (last - first) / steps:.2f} ms")
    yield profiled(place, f"vLLM, {engine.name}: {steps} steps of {count} sequences",
                   lambda: _drawn(llm, count, steps, size.vocabulary)[1])


def _sleep(place: Place, engine: Engine, llm: Any) -> Iterator[Row]:
    """What each level gives back, and how long it takes; at level 1 a second time, when main memory is pinned."""
    what = f"vLLM, {engine.name}: sleep"
    if not place.gpu or not _sleeps():
        yield not_run(what, "vLLM's allocator does not load here" if place.gpu else "sleep is for GPUs")
        return
    before, _ = _drawn(llm, 8, 16, 1000, temperature=0.0)
    for name, level in (("level 1, the first time", 1), ("level 1", 1), ("level 2", 2)):
        free = _free()
        slept = _seconds(partial(llm.sleep, level=level))
        freed = _free() - free
        woken = [_seconds(partial(llm.wake_up, tags=[part])) for part in ("weights", "kv_cache")]
        yield Row(f"{what}, {name}", f"{slept:.2f} s, awake in {sum(woken):.2f} s",
                  f"{freed / GIB:.1f} GiB given back, {(free - _free()) / GIB:.2f} GiB less are free afterwards; "
                  f"weights {woken[0]:.2f} s, cache {woken[1]:.2f} s; graphs "
                  f"{'offloaded' if engine.offloads_graphs else 'resident'}")
        if level == 1:
            after, _ = _drawn(llm, 8, 16, 1000, temperature=0.0)
            yield judged(f"{what}, {name}: tokens afterwards", "the same" if after == before else "others",
                         after == before, "8 greedy responses of 16 tokens")


def _sleeps() -> bool:
    """Whether the allocator that sleep needs could be loaded."""
    from vllm.device_allocator.cumem import cumem_available

    return bool(cumem_available)


def _free() -> int:
    import torch

    free: int = torch.cuda.mem_get_info()[0]
    return free


def _seconds(call: Callable[[], Any]) -> float:
    import torch

    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began
