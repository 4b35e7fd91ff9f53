"""The doctor's look at GPUs: whether their driver is new enough and their memory enough, and NCCL between them."""

import os
import shutil
from collections.abc import Mapping, Sequence

from rlhf_ray.cli.finding import Finding, installed
from rlhf_ray.planning.local_machine import GPU

LEAST_DRIVER = 580
"""NVIDIA's driver branch for CUDA 13.0, which torch 2.13 is built for (CUDA 13.0 release notes, table 2)."""
LEAST_GIB = 16.0
"""A one-GPU run of a 0.5B model in bfloat16 with AdamW's state: 16 bytes a weight and some for the cache."""
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SLOW_WAYS = {"NCCL_P2P_DISABLE": "GPUs of a node then talk through main memory",
             "NCCL_IB_DISABLE": "nodes then talk over TCP", "NCCL_SHM_DISABLE": "GPUs of a node then talk over TCP"}


def check_gpus(gpus: Sequence[GPU]) -> Finding:
    """Whether the driver runs torch's CUDA, and the memory holds a small run."""
    if not gpus:
        broken = "nvidia-smi is there and lists no GPU; look at its own message" if shutil.which("nvidia-smi") else ""
        return Finding("warn" if broken else "ok", "GPU", "none: everything runs on the CPU", broken)
    found = ", ".join(f"{gpu.name} ({gpu.gib:.0f} GiB)" for gpu in gpus) + f", driver {gpus[0].driver}"
    branch = gpus[0].driver.partition(".")[0]
    if branch.isdecimal() and int(branch) < LEAST_DRIVER:
        return Finding("fail", "GPU", found, f"torch's CUDA 13.0 needs driver {LEAST_DRIVER} or newer; update it, or "
                                             "hide the GPU (CUDA_VISIBLE_DEVICES=) and run on the CPU")
    if min(gpu.gib for gpu in gpus) < LEAST_GIB:
        return Finding("warn", "GPU", found, f"under {LEAST_GIB:g} GiB a 0.5B model needs LoRA or offload_optimizer"
                                             "; `rlhf-ray plan CONFIG` says whether yours fits")
    return Finding("ok", "GPU", found)


def check_nccl(gpus: Sequence[GPU], environment: Mapping[str, str] = os.environ) -> Finding:
    """NCCL, over which GPU learners reduce gradients and weights travel to generators."""
    if not gpus:
        return Finding("ok", "NCCL", "not needed without a GPU")
    versions = [f"{name} {version}" for name in NCCL if (version := installed(name))]
    if not versions:
        return Finding("fail", "NCCL", "not installed", "it comes with torch's CUDA build: make install EXTRA=gpu")
    slow = [f"{name}={environment[name]}: {why}" for name, why in SLOW_WAYS.items()
            if environment.get(name, "0") not in ("", "0")]
    if slow and len(gpus) > 1:
        return Finding("warn", "NCCL", ", ".join(versions), f"{'; '.join(slow)}. Unset unless you must")
    return Finding("ok", "NCCL", ", ".join(versions))
