"""The machine at hand as a node to plan for: looks only, and imports nothing heavy."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlhf_ray.config.run import PoolConfig
from rlhf_ray.planning.hardware import H100, Hardware, gpu_of
from rlhf_ray.planning.memory import GIB
from rlhf_ray.planning.nodes import Node
from rlhf_ray.planning.nvidia_smi import GPU, gpus_here


def this_machine(pools: Sequence[PoolConfig], memory_bytes: float) -> Node:
    """This machine, on which a local Ray counts as many logical CPUs, and custom resources, as the pools ask for.

    Args:
        memory_bytes: of main memory, that the run may have.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    gpus = [as_hardware(gpu) for gpu in gpus_here()] if any(pool.gpus for pool in pools) else []
    pooled = sum(pool.cpus * pool.bundles for pool in pools)
    custom: Counter[str] = Counter()
    for pool in pools:
        custom.update({kind: amount * pool.bundles for kind, amount in pool.resources.items()})
    resources = {"CPU": max(pooled, cores), "GPU": float(len(gpus)), **custom}
    return Node("this machine", resources, memory_bytes, gpus[0] if gpus else None, real_cores=cores)


def as_hardware(gpu: GPU) -> Hardware:
    """A GPU's figures with the memory that it tells; a kind that is not known has an H100's."""
    known = gpu_of(gpu.name) or replace(H100, name=gpu.name)
    return replace(known, memory_bytes=gpu.gib * GIB)
