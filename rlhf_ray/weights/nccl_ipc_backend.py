"""vLLM's nccl and ipc back-ends, with every tensor verified before the model loads it.

vLLM's workers create them by name (`vllm_backend` registers the names). A tensor that fails verification fails the
update while the model is partly loaded; the engine is then unusable and is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from rlhf_ray.errors import WeightsError
from rlhf_ray.internals.vllm import checkpoint_weights, load_checkpoint_weights
from rlhf_ray.records import TensorEntry, WeightOffer
from rlhf_ray.weights.direct_transport import GlooBroadcast, handle_arguments
from rlhf_ray.weights.fingerprint import require_fingerprint
from rlhf_ray.weights.manifest import torch_dtype
from rlhf_ray.weights.object_store_backend import ObjectStoreWeightTransferEngine


@dataclass
class OfferInfo(WeightTransferUpdateInfo):
    """A `WeightOffer` as vLLM carries it to its workers."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    digests: list[str]
    handles: list[dict[str, list[Any]]] = field(default_factory=list)

    def entries(self) -> Iterator[TensorEntry]:
        """The announced tensors."""
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            size = torch.Size(shape).numel() * torch_dtype(dtype).itemsize
            yield TensorEntry(name, dtype, tuple(shape), size)


def offer_info(offer: WeightOffer) -> dict[str, Any]:
    """The message that vLLM's `update_weights` carries to the workers."""
    entries = offer.entries
    return {"names": [e.name for e in entries], "dtype_names": [e.dtype for e in entries],
            "shapes": [list(e.shape) for e in entries], "digests": offer.digests, "handles": offer.handles}


class VerifyingLoader:
    """A model's `load_weights` that verifies every tensor first.

    Args:
        config: of transformers' model, whose parameters arrive.
    """

    def __init__(self, model: Any, config: Any, info: OfferInfo) -> None:
        self._model, self._config = model, config
        self._expected = {
            entry.name: (entry, digest) for entry, digest in zip(info.entries(), info.digests, strict=True)}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See the model's own `load_weights`."""
        load_checkpoint_weights(self._model, checkpoint_weights(self._config, self._verified(weights)))

    def require_all(self) -> None:
        """
        Raises:
            WeightsError: an announced tensor did not arrive.
        """
        if self._expected:
            raise WeightsError(f"{len(self._expected)} announced tensors did not arrive, "
                               f"{next(iter(self._expected))!r} among them; publish this version again")

    def _verified(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name not in self._expected:
                raise WeightsError(f"tensor {name!r} arrived twice, or was not announced; publish this version again")
            entry, digest = self._expected.pop(name)
            require_fingerprint(entry, tensor, digest)
            yield name, tensor


class _Verified:
    """Puts a verifying loader in place of a vLLM back-end's model while it receives."""

    model: Any
    model_config: Any

    def receive_verified(self, info: OfferInfo, update: Any) -> None:
        model, loader = self.model, VerifyingLoader(self.model, self.model_config.hf_config, info)
        self.model = loader
        try:
            super().receive_weights(update)  # type: ignore[misc]
        finally:
            self.model = model
        loader.require_all()


class VerifiedNCCLEngine(_Verified, NCCLWeightTransferEngine):
    """Receives a broadcast over NCCL."""

    update_info_cls = OfferInfo

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the broadcast, after leaving the previous one."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: Any) -> None:
        """Receive one bucket."""
        self.receive_verified(update_info, NCCLWeightTransferUpdateInfo(
            update_info.names, update_info.dtype_names, update_info.shapes))


class VerifiedIPCEngine(_Verified, IPCWeightTransferEngine):
    """Reads the learner's memory on the same GPU through handles."""

    update_info_cls = OfferInfo

    def receive_weights(self, update_info: Any) -> None:
        """Receive one bucket."""
        handles = [{gpu: handle_arguments(handle) for gpu, handle in of_tensor.items()}
                   for of_tensor in update_info.handles]
        self.receive_verified(update_info, IPCWeightTransferUpdateInfo(
            update_info.names, update_info.dtype_names, update_info.shapes, ipc_handles=handles))


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """As vLLM's own for NCCL, with an address in place of NCCL's id."""

    address: str
    rank_offset: int
    world_size: int


class VerifiedGlooEngine(ObjectStoreWeightTransferEngine):
    """The same between processes without GPUs, so that everything around the broadcast can be tested there."""

    init_info_cls = GlooInitInfo  # type: ignore[assignment]
    update_info_cls = OfferInfo  # type: ignore[assignment]

    _broadcast: GlooBroadcast | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the broadcast, after leaving the previous one."""
        self.shutdown()
        self._broadcast = GlooBroadcast(
            init_info.address, init_info.rank_offset + self.parallel_config.rank, init_info.world_size)

    def shutdown(self) -> None:
        """Leave the broadcast; does nothing if none was joined."""
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None

    def receive_weights(self, update_info: Any) -> None:
        """Receive one bucket. All of it is received before any tensor is verified, as with NCCL's packed buckets:
        stopping in the middle would leave the sender waiting."""
        received = {entry.name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
                    for entry in update_info.entries()}
        assert self._broadcast is not None, "init_transfer_engine comes before the first bucket"
        for tensor in received.values():
            self._broadcast(tensor)
        loader = VerifyingLoader(self.model, self.model_config.hf_config, update_info)
        loader.load_weights(received.items())
        loader.require_all()
