"""The process group of a model's ranks, one worker process per rank: gloo on CPUs, NCCL on GPUs."""

import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist

from rlhf_ray.errors import ClusterError
from rlhf_ray.internals.deepspeed import import_muon_uncompiled, skip_shared_memory_kernel

T = TypeVar("T")


def free_address(host: str) -> str:
    """`tcp://host:port` with a free port at `host`, the address at which other nodes reach this one.

    Raises:
        ClusterError: this machine does not have the address.
    """
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ClusterError(f"nothing can listen on {host}, the address of this node in its Ray cluster: "
                               f"{error.strerror}. Start the node with --node-ip-address=ADDRESS, an address of this "
                               "machine that the other nodes reach") from error
        return f"tcp://{f'[{host}]' if ':' in host else host}:{probe.getsockname()[1]}"


def rank_store(address: str, rank: int, world: int, timeout: timedelta) -> dist.TCPStore:
    """The key-value store through which ranks find each other. Rank 0 serves it, at `address` only: the listener that
    torch opens itself accepts connections at all addresses of the machine.

    The store has no authentication, and neither has gloo: who reaches the address can take part.

    Args:
        address: a `free_address` of rank 0's node.

    Raises:
        OSError: another process has taken the port.
        RuntimeError: torch's own, if a rank does not arrive in time.
    """
    url = urlsplit(address)
    host, port = url.hostname or "", url.port or 0
    listener = socket.create_server((host, port), family=_family(host)).detach() if rank == 0 else None
    return dist.TCPStore(host, port, world, rank == 0, timeout, master_listen_fd=listener)


def listen_towards(address: str, cuda: bool) -> None:
    """Let gloo listen only on the network interface that connects this process with the store at `address`: by itself
    it takes the one that the machine's name resolves to.

    NCCL selects an interface by its speed and listens only there, so it is restricted in a cluster on loopback only.
    Environment variables that the user has set are kept.

    Raises:
        ClusterError: no interface has the address from which connections to `address` start.
    """
    own = _own_address(address)
    interfaces = [name for name, addresses in psutil.net_if_addrs().items()
                  if any(each.address.partition("%")[0] == own for each in addresses)]
    if not interfaces and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise ClusterError(f"no network interface of this machine has {own}, its address towards {address}; set "
                           "GLOO_SOCKET_IFNAME to the interface that connects the nodes")
    for interface in interfaces[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if cuda and ip_address(own).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def join(address: str, rank: int, world: int, timeout_s: float) -> None:
    """Join the process group at `address` as `rank` of `world`, for torch and DeepSpeed alike.

    Args:
        timeout_s: longest wait for the other ranks, here and in every later collective call, in seconds.

    Raises:
        OSError, RuntimeError: as `rank_store`.
    """
    import deepspeed

    cuda = torch.cuda.is_available()
    backend, timeout = "nccl" if cuda else "gloo", timedelta(seconds=timeout_s)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    if not cuda:
        skip_shared_memory_kernel()
    import_muon_uncompiled()
    if not dist.is_initialized():
        listen_towards(address, cuda)
        dist.init_process_group(
            backend, store=rank_store(address, rank, world, timeout), rank=rank, world_size=world, timeout=timeout,
            device_id=torch.device("cuda", 0) if cuda and world > 1 else None)  # as DeepSpeed gives it
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(address: str) -> str:
    """Address of this machine from which connections to `address` start. Nothing is sent."""
    url = urlsplit(address)
    host = url.hostname or ""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, url.port))
        own: str = probe.getsockname()[0]
    return own


def _reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # NCCL cannot reduce CPU tensors
    result = values.to(device)
    dist.all_reduce(result, op=operation)
    return result.cpu()
