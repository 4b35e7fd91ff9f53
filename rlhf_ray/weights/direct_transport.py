"""What both sides of a direct transport share: handles of GPU memory (ipc), and the broadcast that stands in for NCCL
between processes without GPUs (gloo).

torch describes a CUDA tensor for another process by the arguments of `rebuild_cuda_tensor`, which include classes, a
dtype and bytes. vLLM would pickle them, and its processes accept pickles only with a switch that lets senders run code;
we refuse that switch. So handles travel as plain lists of numbers and strings, which any serialiser accepts. The two
classes are always the same and are left out.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rlhf_ray.engine.distributed import listen_towards, rank_store
from rlhf_ray.errors import WeightsError
from rlhf_ray.internals.torch import HANDLE
from rlhf_ray.weights.manifest import torch_dtype

TENSOR_CLASS, STORAGE_CLASS, DTYPE, *SIZES = map(
    HANDLE.index, ("tensor_cls", "storage_cls", "dtype", "tensor_size", "tensor_stride"))
GLOO_TIMEOUT = timedelta(minutes=5)


def plain_handle(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of `rebuild_cuda_tensor` as plain values, without classes.

    Raises:
        WeightsError: torch's arguments are not the known ones, as in another version of torch.
    """
    if len(arguments) != len(HANDLE) or not isinstance(arguments[DTYPE], torch.dtype):
        raise WeightsError(f"torch {torch.__version__} describes GPU memory in {len(arguments)} parts that are not the "
                           f"{len(HANDLE)} known ones; set weights.transport to object_store, or install torch 2.13")
    return [None if place in (TENSOR_CLASS, STORAGE_CLASS) else _plain(value) for place, value in enumerate(arguments)]


def handle_arguments(handle: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments that `plain_handle` received.

    Raises:
        WeightsError: this is not such a handle.
    """
    if len(handle) != len(HANDLE):
        raise WeightsError(f"a handle of GPU memory has {len(handle)} parts, not {len(HANDLE)}; install the same "
                           "version of torch on every node")
    values = [_value(part) for part in handle]
    values[TENSOR_CLASS], values[STORAGE_CLASS] = torch.Tensor, torch.UntypedStorage
    values[DTYPE] = torch_dtype(str(values[DTYPE]))
    for place in SIZES:
        values[place] = tuple(values[place])
    return tuple(values)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value  # sizes and strides are tuples


def _value(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part


class GlooBroadcast:
    """One member of a broadcast from rank 0."""

    def __init__(self, address: str, rank: int, world: int) -> None:
        """Connect to the other members at tcp://host:port, where rank 0 listens.

        Raises:
            RuntimeError: torch's own, if a member does not arrive in time or disconnects.
        """
        import torch.distributed as dist

        listen_towards(address, cuda=False)
        store = rank_store(address, rank, world, GLOO_TIMEOUT)
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, world, GLOO_TIMEOUT)

    def __call__(self, tensor: Tensor) -> None:
        """Copy rank 0's `tensor` into the other members' `tensor`; raises as `__init__` does, and after `close`."""
        if self._group is None:
            raise RuntimeError("this member has left its broadcast; connect again before sending")
        self._group.broadcast(tensor, 0).wait()

    def close(self) -> None:
        """Leave the broadcast."""
        self._group = None  # closes its connections; torch's own `shutdown` leaves them open
