"""The "object_store" back-end of vLLM's own weight update: loads verified buckets of bytes into a running model.

`worker_extension_cls` names this module, so every process with a part of the model imports it before the model is
built, and importing it registers the back-end and corrected models. (It is the only module of the project that acts on
import; only vLLM imports it.) Buckets arrive as arrays in the same process, or as the path of a file that all workers
of the engine map, so no bytes are serialised. See https://docs.vllm.ai/en/latest/training/weight_transfer/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import ModelRegistry
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlhf_ray.internals.vllm import (
    begin_reload,
    checkpoint_weights,
    finish_reload,
    load_adapter,
    load_checkpoint_weights,
)
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.manifest import unpack
from rlhf_ray.weights.shared_files import mapped_files, read_file

BACKEND = "object_store"
DIRECT = {"nccl": "VerifiedNCCLEngine", "ipc": "VerifiedIPCEngine", "gloo": "VerifiedGlooEngine"}
"""Back-ends of `direct_backend` by transport."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """This back-end needs no handshake."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket: its entries as plain tuples, and its bytes as arrays or as a file (see `shared_files`)."""

    entries: list[Any]
    arrays: list[NDArray[np.uint8]] | None = None
    path: str | None = None


def bucket_info(
    entries: Sequence[TensorEntry], arrays: list[NDArray[np.uint8]] | None = None, path: str | None = None
) -> dict[str, Any]:
    """The message that vLLM's `update_weights` carries to the workers; give `arrays` or `path`."""
    return asdict(BucketInfo([list(astuple(e)) for e in entries], None, path)) | {"arrays": arrays}


def tensors_in(info: BucketInfo) -> Iterator[tuple[str, Tensor]]:
    """A bucket's tensors by name, as views of the arrays or of the mapped file."""
    entries = [TensorEntry(name, dtype, tuple(shape), size) for name, dtype, shape, size in info.entries]
    return unpack(read_file(str(info.path), entries) if info.arrays is None else
                  zip(entries, info.arrays, strict=True))


class ObjectStoreWeightTransferEngine(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """Loads weights in checkpoint format, layer by layer, in place."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Does nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        self._kernels = begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. (The base class would always synchronise an accelerator, which a CPU does not have.)"""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Pass a bucket's tensors to the model's own loader. Layers keep them until they are complete."""
        self.load_parameters(tensors_in(update_info))

    def load_parameters(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Load parameters of transformers' model by name."""
        load_checkpoint_weights(self.model, checkpoint_weights(self.model_config.hf_config, parameters))

    def finish_weight_update(self) -> None:
        """Activate the loaded layers."""
        finish_reload(self.model, self.model_config, self._kernels)

    def shutdown(self) -> None:
        """Does nothing: there are no resources."""


class WorkerExtension:
    """Methods that vLLM adds to its workers (`worker_extension_cls`), which import this module for it."""

    get_model: Callable[[], Any]

    def fused_layers(self) -> dict[str, list[str]]:
        """See `SamplingEngine.fused_layers`; of the layers in this process."""
        return dict(getattr(self.get_model(), "packed_modules_mapping", {}))

    def mapped_files(self) -> list[int]:
        """See `shared_files.mapped_files`."""
        return mapped_files()

    def load_adapter(self, buckets: list[dict[str, Any]], rank: int) -> None:
        """Replace the adapter with which all requests run.

        vLLM's weight update cannot: when it ends, it removes all adapters, as they belong to the former base.

        Args:
            buckets: messages as of `bucket_info`.

        Raises:
            ModelError: as `internals.vllm.load_adapter`.
        """
        tensors = dict(named for bucket in buckets for named in tensors_in(BucketInfo(**bucket)))
        load_adapter(self.get_model(), tensors, rank)


def backend_name(transport: str, gpus: float) -> str:
    """The name under which a transport's back-end is registered. Without GPUs, gloo stands in for NCCL, for testing."""
    if transport == BACKEND:
        return BACKEND
    return f"verified_{'gloo' if transport == 'nccl' and not gpus else transport}"


def register_corrected_models() -> None:
    """Let vLLM run `corrected_models` instead of its own, in this process."""
    ModelRegistry.register_model("BloomForCausalLM", "rlhf_ray.weights.corrected_models:Bloom")


register_corrected_models()
WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreWeightTransferEngine)
for _carrier, _class in DIRECT.items():
    WeightTransferEngineFactory.register_engine(f"verified_{_carrier}", "rlhf_ray.weights.nccl_ipc_backend", _class)
