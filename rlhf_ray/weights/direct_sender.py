"""The learner's side of transports from GPU to GPU: vLLM's own trainer engines, given one bucket at a time.

vLLM's trainer normally drives the generators through a client. Here the coordinator drives both sides, so that its
verification, deadlines and worker replacement apply; the client given to vLLM's trainer only records calls. The module
imports vLLM, so only learners that use such a transport import it.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
from vllm.utils.nccl import unpinned_nccl_env

from rlhf_ray.engine.distributed import free_address
from rlhf_ray.records import WeightRoute
from rlhf_ray.weights.direct_transport import GlooBroadcast, plain_handle

KEPT_BUCKETS = 2
"""Buckets whose memory is kept: the one being read, and the next one, which is offered meanwhile."""


class Sender(Protocol):
    """Sends one bucket after another to the generators."""

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        """Keep a bucket for the generators; returns handles if the transport uses them. A collective call for ipc."""
        ...

    def send(self) -> None:
        """Broadcast the offered bucket; does nothing if generators read it through handles."""
        ...

    def release(self) -> None:
        """Free the offered buckets at the end of a publication."""
        ...

    def close(self) -> None:
        """Disconnect from the generators and free the connection's resources."""
        ...


class NullSyncClient:
    """A `VLLMWeightSyncClient` that sends nothing: the coordinator calls the generators itself."""

    def __init__(self) -> None:
        self.update: Any = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Does nothing: the coordinator sends every generator its own."""

    def start_weight_update(self) -> None:
        """Does nothing: generators start at a publication's first bucket."""

    def update_weights(self, update_info: Any) -> None:
        """Keep the update, which contains the handles."""
        self.update = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Does nothing: the coordinator calls the generators."""


class BucketSource(WeightSource):
    """The tensors of the current bucket."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each tensor."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class NCCLSender(Sender):
    """Broadcasts from the learner's first rank over NCCL.

    vLLM's `trainer_init` would let the members find each other through a store that listens on all interfaces and whose
    values it unpickles. NCCL's unique id is all that they need, and it arrives with the route.
    """

    def __init__(self, route: WeightRoute) -> None:
        self._bucket = BucketSource()
        self._engine = NCCLTrainerWeightTransferEngine(client=NullSyncClient(), source=self._bucket, packed=True)
        self._engine.model_update_group = uid_init_process_group(
            b64decode(route.nccl_id), 0, route.world, torch.accelerator.current_device_index())

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        self._bucket.tensors = tensors
        return []

    def send(self) -> None:
        self._engine.send_weights()

    def release(self) -> None:
        self._bucket.tensors = {}

    def close(self) -> None:
        """See `Sender.close`. Only this frees NCCL's communicator and its GPU memory."""
        self.release()
        self._engine.shutdown()


class IPCSender(Sender):
    """Sends handles of this rank's GPU memory; rank 0 collects those of all ranks."""

    def __init__(self, rank: int) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        self._bucket, self._client = BucketSource(), NullSyncClient()
        self._kept: deque[Mapping[str, Tensor]] = deque(maxlen=KEPT_BUCKETS)
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=rank, packed=False), client=self._client, source=self._bucket)

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        self._kept.append(tensors)
        self._bucket.tensors = tensors
        self._engine.send_weights()
        update, self._client.update = self._client.update, None
        handles = update["ipc_handles"] if update else []
        return [{gpu: plain_handle(arguments) for gpu, arguments in of_tensor.items()} for of_tensor in handles]

    def send(self) -> None:
        """See `Sender.send`."""

    def release(self) -> None:
        self._kept.clear()
        self._bucket.tensors = {}
        torch.cuda.ipc_collect()

    def close(self) -> None:
        self.release()
        self._engine.shutdown()


class GlooSender(Sender):
    """The same broadcast between processes without GPUs, for testing."""

    def __init__(self, route: WeightRoute) -> None:
        self._broadcast = GlooBroadcast(route.address, 0, route.world)
        self._tensors: Mapping[str, Tensor] = {}

    def offer(self, tensors: dict[str, Tensor]) -> list[dict[str, list[Any]]]:
        self._tensors = tensors
        return []

    def send(self) -> None:
        for tensor in self._tensors.values():
            self._broadcast(tensor)

    def release(self) -> None:
        self._tensors = {}

    def close(self) -> None:
        self.release()
        self._broadcast.close()


def broadcast_route(device: torch.device, host: str, world: int) -> WeightRoute:
    """How a broadcast of `world` processes from this one, with its model on `device`, is joined.

    Args:
        host: address of this node.
    """
    if device.type != "cuda":
        return WeightRoute("gloo", world, address=free_address(host))
    with unpinned_nccl_env():  # as every member joins
        unique_id = NCCLLibrary().ncclGetUniqueId()
    return WeightRoute("nccl", world, nccl_id=b64encode(bytes(unique_id.internal)).decode("ascii"))


def open_sender(route: WeightRoute, rank: int) -> Sender | None:
    """The sender of one rank; None if another rank sends for it. Waits for the generators of a broadcast to connect."""
    if route.transport == "ipc":
        return IPCSender(rank)
    if rank:
        return None
    return NCCLSender(route) if route.transport == "nccl" else GlooSender(route)
