"""The learner's side of transports from GPU to GPU: vLLM's own trainer engines, fed bucket by bucket.

vLLM's trainer drives its engines itself, through a client. Here the coordinator drives both sides, so that each keeps
its gate, its deadlines and its way to be replaced; the client that vLLM's trainer gets only notes what it is told.
Imports vLLM: only learners that send this way import the module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rlhf_ray.records import WeightRoute
from rlhf_ray.weights.direct_transport import GlooBroadcast, plain_handle

KEPT_BUCKETS = 2
"""Buckets whose memory is kept: the one that is read, and the next, which is offered meanwhile."""


class Sender(Protocol):
    """Hands one bucket after the other to the generators."""

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        """Keep a bucket for them; returns the tensors' handles, where it has some. A collective call for ipc."""
        ...

    def send(self) -> None:
        """Broadcast what was offered; where there are handles, nothing is left to do."""
        ...

    def release(self) -> None:
        """The publication is over: keep nothing."""
        ...

    def close(self) -> None:
        """Leave the generators: another sender takes its place, or none. What joined them is given back."""
        ...


class NullSyncClient:
    """vLLM's `VLLMWeightSyncClient` that passes nothing on: the coordinator tells the generators."""

    def __init__(self) -> None:
        self.update: Any = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The coordinator gave every generator its own."""

    def start_weight_update(self) -> None:
        """Generators start at a publication's first bucket."""

    def update_weights(self, update_info: Any) -> None:
        """Keep it: the handles are in it."""
        self.update = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Generators finish when the coordinator says so."""


class BucketSource(WeightSource):
    """The tensors of the present bucket."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        """As vLLM wants it."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class NCCLSender:
    """Broadcast from the learner's first rank."""

    def __init__(self, route: WeightRoute) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self._bucket = BucketSource()
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(route.host, route.port, route.world, packed=True, rank=0), client=NullSyncClient(),
            source=self._bucket)

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        """See `Sender.offered`."""
        self._bucket.tensors = tensors
        return []

    def send(self) -> None:
        """See `Sender.send`."""
        self._engine.send_weights()

    def release(self) -> None:
        """See `Sender.release`."""
        self._bucket.tensors = {}

    def close(self) -> None:
        """See `Sender.close`. Nobody else gives NCCL's communicator back, nor the GPU memory that it has."""
        self.release()
        self._engine.shutdown()


class IPCSender:
    """Handles of this rank's GPU memory; all ranks' handles come together at the first."""

    def __init__(self, rank: int) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        self._bucket, self._told = BucketSource(), NullSyncClient()
        self._lent: deque[Mapping[str, Tensor]] = deque(maxlen=KEPT_BUCKETS)
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=rank, packed=False), client=self._told, source=self._bucket)

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        """See `Sender.offered`."""
        self._lent.append(tensors)
        self._bucket.tensors = tensors
        self._engine.send_weights()
        update, self._told.update = self._told.update, None
        found = update["ipc_handles"] if update else []
        return [{gpu: plain_handle(arguments) for gpu, arguments in of_tensor.items()} for of_tensor in found]

    def send(self) -> None:
        """See `Sender.send`."""

    def release(self) -> None:
        """See `Sender.release`."""
        self._lent.clear()
        self._bucket.tensors = {}
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """See `Sender.close`."""
        self.release()
        self._engine.shutdown()


class GlooSender:
    """The same broadcast between processes without GPUs, with which the way around it is tried out."""

    def __init__(self, route: WeightRoute) -> None:
        self._broadcast = GlooBroadcast(route.host, route.port, 0, route.world)
        self._tensors: Mapping[str, Tensor] = {}

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        """See `Sender.offered`."""
        self._tensors = tensors
        return []

    def send(self) -> None:
        """See `Sender.send`."""
        for tensor in self._tensors.values():
            self._broadcast(tensor)

    def release(self) -> None:
        """See `Sender.release`."""
        self._tensors = {}

    def close(self) -> None:
        """See `Sender.close`."""
        self.release()
        self._broadcast.close()


def open_sender(route: WeightRoute, rank: int, device: torch.device) -> Sender | None:
    """The sender of one rank; None where another rank sends for it. Waits for the generators of a broadcast."""
    if route.transport == "ipc":
        return IPCSender(rank)
    if rank:
        return None
    return NCCLSender(route) if device.type == "cuda" else GlooSender(route)
