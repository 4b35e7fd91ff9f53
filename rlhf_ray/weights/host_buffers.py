"""Main memory for the buckets of a GPU's learner: pinned once, since pinning takes longer than a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.shared_files import aligned

Wait = Callable[[], Any]
"""Returns once a tensor's bytes have arrived."""


class HostBuffers:
    """Two buffers that take turns: a bucket's bytes stay until the bucket after the next one is copied.

    Args:
        nbytes: see `bytes_needed`; of the largest bucket.
        pinned: on a CPU without a GPU, memory cannot be pinned.
    """

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]

    def copy(
        self, entries: Sequence[TensorEntry], tensors: Mapping[str, Tensor]
    ) -> tuple[list[NDArray[np.uint8]], list[Wait]]:
        """Copy one bucket's tensors, one after the other, behind the work that computes them; returns at once.

        Returns:
            arrays: their bytes in a buffer, in the order of `entries`.
            waits: for each array, what returns once its bytes have arrived. A tensor may be freed before that: its
                memory is used again only behind the copy, on the same stream.
        """
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        arrays: list[NDArray[np.uint8]] = []
        waits: list[Wait] = []
        offset = 0
        for entry in entries:
            source = tensors[entry.name].view(-1).view(torch.uint8)
            target = buffer[offset : offset + len(source)]
            target.copy_(source, non_blocking=True)
            arrays.append(target.numpy())
            waits.append(_after(source))
            offset += aligned(len(source))
        return arrays, waits


def bytes_needed(entries: Sequence[TensorEntry]) -> int:
    """Of a buffer for this bucket."""
    return sum(aligned(entry.nbytes) for entry in entries)


def _after(copied: Tensor) -> Wait:
    """Waits for what the tensor's GPU was given so far. A tensor of the CPU was copied already."""
    if not copied.is_cuda:
        return bool
    event = torch.cuda.Event(blocking=True)  # the thread sleeps
    event.record(torch.cuda.current_stream(copied.device))
    return event.synchronize
