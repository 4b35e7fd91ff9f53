"""The "object_store" back-end of vLLM's own weight update: loads verified buckets of bytes into a running model.

Naming this module in `worker_extension_cls` makes every process that holds a part of the model import it before the
model is built, and importing it registers the back-end. (The one module of the project that acts on import; only vLLM
imports it.) Buckets arrive as arrays in the same process, or as the path of a file that all workers of the engine
can map, so that no bytes are serialised on the way. See https://docs.vllm.ai/en/latest/training/weight_transfer/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.manifest import unpack

BACKEND = "object_store"
DIRECT = {"nccl": "VerifiedNCCLEngine", "ipc": "VerifiedIPCEngine", "gloo": "VerifiedGlooEngine"}
"""Back-ends of `direct_backend`, by what carries the bytes."""
ALIGNMENT = 64
"""Bytes. Every tensor in a file starts at a multiple of it: enough for any dtype's view, and one cache line."""


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """This back-end needs no handshake."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket: its entries as plain tuples, and its bytes as arrays or as a file's path (see `aligned`)."""

    entries: list[Any]
    arrays: list[NDArray[np.uint8]] | None = None
    path: str | None = None


def bucket_info(
    entries: Sequence[TensorEntry], arrays: list[NDArray[np.uint8]] | None = None, path: str | None = None
) -> dict[str, Any]:
    """The message that vLLM's `update_weights` carries to the workers; give `arrays` or `path`."""
    return asdict(BucketInfo([list(astuple(e)) for e in entries], None, path)) | {"arrays": arrays}


def aligned(nbytes: int) -> int:
    """How many bytes behind a tensor of `nbytes` the next one begins in a bucket's file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def read_file(path: str, entries: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, NDArray[np.uint8]]]:
    """The tensors in a bucket's file, which is mapped."""
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    offset = 0
    for entry in entries:
        yield entry, data[offset : offset + entry.nbytes]
        offset += aligned(entry.nbytes)


class ObjectStoreWeightTransferEngine(WeightTransferEngine[NoInitInfo, BucketInfo]):
    """Loads weights in checkpoint format, layer by layer, in place."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Make every layer wait for new weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. (The base class would also synchronise an accelerator, which a CPU has none of.)"""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Hand a bucket's tensors to the model's own loader. Layers hold on to them until they are complete."""
        entries = [TensorEntry(name, dtype, tuple(shape), size) for name, dtype, shape, size in update_info.entries]
        if update_info.arrays is None:
            self.model.load_weights(unpack(read_file(str(update_info.path), entries)))
        else:
            self.model.load_weights(unpack(zip(entries, update_info.arrays, strict=True)))

    def finish_weight_update(self) -> None:
        """Put the loaded layers in service.

        On CPUs the output projection multiplies with a packed copy of its weights, and with tied embeddings the
        reload leaves that copy as it was: the model goes on with the old head, silently. So it is packed again.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


class WorkerExtension:
    """Empty: naming it in `worker_extension_cls` is what brings this module into the workers."""


def backend_name(transport: str, gpus: float) -> str:
    """What vLLM knows a transport's back-end by. Where there are no GPUs gloo stands in for NCCL, to try it out."""
    if transport == BACKEND:
        return BACKEND
    return f"verified_{'gloo' if transport == 'nccl' and not gpus else transport}"


WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreWeightTransferEngine)
for _carrier, _class in DIRECT.items():
    WeightTransferEngineFactory.register_engine(f"verified_{_carrier}", "rlhf_ray.weights.direct_backend", _class)
