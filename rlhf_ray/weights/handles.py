"""Handles of GPU memory as plain lists of numbers and texts, which any serialiser takes and none has to unpickle.

torch describes a tensor for another process by the arguments of `rebuild_cuda_tensor`, among them classes, a dtype and
bytes. vLLM would pickle them, which its processes take only with a switch that lets them run what they are sent; we
refuse that one. Of each class there is but one that we send, so they need not travel.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_ray.errors import WeightsError
from rlhf_ray.weights.manifest import torch_dtype

ARGUMENTS = 15
"""Of torch 2.13's `rebuild_cuda_tensor`: (tensor_cls, size, stride, offset, storage_cls, dtype, device, handle,
storage_size, storage_offset, requires_grad, ref_counter_handle, ref_counter_offset, event_handle, event_sync)."""
TENSOR_CLASS, SIZES, STORAGE_CLASS, DTYPE = 0, (1, 2), 4, 5


def plain(arguments: Sequence[Any]) -> list[Any]:
    """The arguments without classes.

    Raises:
        WeightsError: they are others than we know: another version of torch.
    """
    if len(arguments) != ARGUMENTS or not isinstance(arguments[DTYPE], torch.dtype):
        raise WeightsError(f"torch {torch.__version__} describes GPU memory in {len(arguments)} parts that are not the "
                           f"{ARGUMENTS} known ones; set weights.transport to object_store, or install torch 2.13")
    return [None if place in (TENSOR_CLASS, STORAGE_CLASS) else _plain(value) for place, value in enumerate(arguments)]


def arguments_of(handle: Sequence[Any]) -> tuple[Any, ...]:
    """What `plain` was given.

    Raises:
        WeightsError: this is no such handle.
    """
    if len(handle) != ARGUMENTS:
        raise WeightsError(f"a handle of GPU memory has {len(handle)} parts, not {ARGUMENTS}")
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
