"""A broadcast over gloo between processes that share no other group."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

TIMEOUT = timedelta(minutes=5)


class GlooBroadcast:
    """One member of a broadcast from rank 0."""

    def __init__(self, host: str, port: int, rank: int, world: int) -> None:
        """Meet the others at host:port, where rank 0 listens.

        Raises:
            RuntimeError: torch's own, where the others do not come or go away.
        """
        import torch.distributed as dist

        store = dist.TCPStore(host, port, world, is_master=rank == 0, timeout=TIMEOUT)
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, world, TIMEOUT)

    def __call__(self, tensor: Tensor) -> None:
        """Send rank 0's `tensor` into that of the others; errors as when it was made, and once it is closed."""
        if self._group is None:
            raise RuntimeError("this member has left its broadcast")
        self._group.broadcast(tensor, 0).wait()

    def close(self) -> None:
        """Leave; nothing can be sent from here any more."""
        self._group = None  # its connections close with it; torch's own `shutdown` leaves them open
