"""The machine at hand as a node to plan for: looks only, and imports nothing heavy."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.hardware import H100, Hardware, gpu_of
from rlhf_ray.planning.nodes import Node

MIB = 2**20
QUERY_S = 20.0


def this_machine(pools: Sequence[PoolConfig], memory_bytes: float) -> Node:
    """This machine, on which a local Ray counts as many logical CPUs, and custom resources, as the pools ask for.

    Args:
        memory_bytes: of main memory, that the run may have.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    gpus = gpus_here() if any(pool.gpus for pool in pools) else []
    pooled = sum(pool.cpus * pool.bundles for pool in pools)
    custom: Counter[str] = Counter()
    for pool in pools:
        custom.update({kind: amount * pool.bundles for kind, amount in pool.resources.items()})
    return Node("this machine", max(pooled, cores), memory_bytes, len(gpus), gpus[0] if gpus else None,
                resources=custom, real_cores=cores)


def gpus_here() -> list[Hardware]:
    """The NVIDIA GPUs of this machine by nvidia-smi; those of a kind that is not known have the memory that it tells,
    and else an H100's figures."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [read_gpu(line) for line in answer.stdout.splitlines()]
    return [gpu for gpu in found if gpu is not None]


def read_gpu(line: str) -> Hardware | None:
    """One line of nvidia-smi's answer: "NVIDIA H100 80GB HBM3, 81559" (MiB); None where it tells no memory: "[N/A]"
    of GPUs that share the processor's, and other messages."""
    name, _, memory = line.rpartition(",")
    if not memory.strip().isdecimal():
        return None
    known = gpu_of(name) or replace(H100, name=name.strip())
    return replace(known, memory_bytes=float(memory) * MIB)
