"""Environment variables of worker processes, which they need before they import anything."""

import os
from collections.abc import Mapping

from rlhf_ray.config.run import PlacementConfig

PLAIN_PYTHON = {"PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": ""}
"""Environment of workers and of Ray's own processes. Otherwise the processes that they start by `python -c`, such as
those of multiprocessing, search the working directory for modules before the standard library; and without assertions
and docstrings (`PYTHONOPTIMIZE=2`) Ray's dashboard does not start, which Ray then tries again and again."""

KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of workers on CPUs: the C library keeps freed memory, and asks for large pages. Every optimizer step and
every publication of weights needs the memory again that the previous one freed. Taking these pages from the kernel and
returning them costs several times as much as a copy into them: a seventh of a small model's update. (glibc's
mallopt(3), and its manual's "Memory Allocation Tunables")"""
GIVE_BACK_LARGE = {**KEEP_MEMORY, "MALLOC_MMAP_MAX_": str(1 << 16), "MALLOC_MMAP_THRESHOLD_": str(8 << 20)}
"""The same, except that blocks of 8 MiB and more are taken from the kernel and returned to it. Under ZeRO-3 whole
weights are allocated and freed in a different order in each pass; kept memory fragments, and reached twice what is in
use at a time."""
ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""The environment variable of torch's memory allocator on GPUs."""


def worker_environment(placement: PlacementConfig, more: Mapping[str, str]) -> dict[str, str]:
    """The variables of every worker at this placement, and `more`, which go before."""
    return {
        "OMP_NUM_THREADS": str(placement.threads),
        "OMP_WAIT_POLICY": "passive",  # a spinning thread takes the core from a worker that has work
        "TOKENIZERS_PARALLELISM": "false",
        **_memory(placement),
        **PLAIN_PYTHON,
        **accelerator_environment(placement.gpus),
        "PYTHONDONTWRITEBYTECODE": "",  # without bytecode every start of a worker compiles torch and vLLM again
        **more,
    }


def _memory(placement: PlacementConfig) -> dict[str, str]:
    if placement.gpus:
        return {}
    return GIVE_BACK_LARGE if placement.is_sharded else KEEP_MEMORY


def accelerator_environment(gpus: float) -> dict[str, str]:
    """Environment variables that a process needs before it imports torch or DeepSpeed. A worker without GPUs must not
    see any: Ray hides GPUs only from workers that request some.

    On GPUs torch's allocator grows its segments instead of adding new ones: micro-batches differ in size, and fixed
    segments leave gaps. An allocator setting of the user's is kept.
    """
    if not gpus:
        return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {ALLOCATOR: os.environ.get(ALLOCATOR, "expandable_segments:True")}


def fixed_segments() -> dict[str, str]:
    """The allocator's setting of a process on a GPU whose memory others open by handle, which takes several times as
    long with growing segments (vllm/distributed/weight_transfer/sharded_rdt_trainer.py)."""
    return {ALLOCATOR: os.environ.get(ALLOCATOR, "")}
