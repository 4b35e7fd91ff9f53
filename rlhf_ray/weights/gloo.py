"""A broadcast over gloo between processes that share no other group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

TIMEOUT = timedelta(minutes=5)


def join_gloo(host: str, port: int, rank: int, world: int) -> Callable[[Tensor], None]:
    """Meet the others at host:port, where rank 0 listens; returns what broadcasts a tensor of rank 0 into the others'.

    Raises:
        RuntimeError: torch's own, where the others do not come or go away.
    """
    import torch.distributed as dist

    store = dist.TCPStore(host, port, world, is_master=rank == 0, timeout=TIMEOUT)
    group = dist.ProcessGroupGloo(store, rank, world, TIMEOUT)

    def broadcast(tensor: Tensor) -> None:
        group.broadcast(tensor, 0).wait()

    return broadcast
