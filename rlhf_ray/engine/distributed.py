"""Process groups of a learner's ranks: one worker process a rank, gloo on CPUs and NCCL on GPUs."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist


def free_address(host: str) -> str:
    """`tcp://host:port` of a free port on this machine, which other nodes know as `host`."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def accelerator_environment(gpus: float) -> dict[str, str]:
    """Variables a process needs before it imports torch or DeepSpeed. Without GPUs of its own it must not see any: Ray
    hides GPUs only from workers that ask for some."""
    return {} if gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def join(address: str, rank: int, world: int, timeout_s: float) -> None:
    """Join the process group at `address` as `rank` of `world`, for torch and DeepSpeed alike.

    Args:
        timeout_s: longest wait for the other ranks, now and in every later collective call.
    """
    import deepspeed

    cuda = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    if not cuda:
        # Otherwise the first init on a CPU compiles a shared-memory kernel for 30-50 s that gloo does without.
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    deepspeed.init_distributed(
        dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False, init_method=address,
        rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s),
    )


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer as plain Python. DeepSpeed asks whether ours is one, and the import alone,
    whose functions are marked for compilation, would load all of torch's compiler: a third of a learner's start."""
    from deepspeed.runtime import compiler

    marked = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = marked


def leave() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum of a small float64 vector over all ranks; a collective call."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest_of_ranks(numbers: list[float]) -> list[float]:
    """Of each number the largest that a rank gives; a collective call."""
    largest: list[float] = _reduced(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
    return largest


def _reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # NCCL reduces nothing that lies on the CPU
    result = values.to(device)
    dist.all_reduce(result, op=operation)
    return result.cpu()
