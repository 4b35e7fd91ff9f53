"""The process group of a model's ranks, one worker process per rank: gloo on CPUs, NCCL on GPUs."""

import os
import socket
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf_ray.internals.deepspeed import import_muon_uncompiled, skip_shared_memory_kernel

T = TypeVar("T")


def free_address(host: str) -> str:
    """`tcp://host:port` with a free port of this machine; `host` is the address under which other nodes reach it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def accelerator_environment(gpus: float) -> dict[str, str]:
    """Environment variables that a process needs before it imports torch or DeepSpeed. A worker without GPUs must not
    see any: Ray hides GPUs only from workers that request some."""
    return {} if gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def join(address: str, rank: int, world: int, timeout_s: float) -> None:
    """Join the process group at `address` as `rank` of `world`, for torch and DeepSpeed alike.

    Args:
        timeout_s: longest wait for the other ranks, here and in every later collective call, in seconds.
    """
    import deepspeed

    cuda = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    if not cuda:
        skip_shared_memory_kernel()
    import_muon_uncompiled()
    deepspeed.init_distributed(
        dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False, init_method=address,
        rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s),
    )


def leave() -> None:
    """Leave the process group; does nothing if none was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum of a small float64 vector over all ranks; a collective call."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest_of_ranks(numbers: list[float]) -> list[float]:
    """Element-wise maximum over all ranks; a collective call."""
    largest: list[float] = _reduced(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
    return largest


def gather_objects(own: T) -> list[T]:
    """Each rank's object, in rank order; a collective call."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # NCCL cannot reduce CPU tensors
    result = values.to(device)
    dist.all_reduce(result, op=operation)
    return result.cpu()
