"""Internals of torch."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

VERSION = "2.13.0"
HANDLE = ("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
          "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
          "ref_counter_offset", "event_handle", "event_sync_required")
"""Arguments of `rebuild_cuda_tensor`, by which torch describes a CUDA tensor to another process of the machine.

Source: 2.13.0, torch/multiprocessing/reductions.py.
Missing: torch documents only queues and pickles, and pickles run code.
Otherwise: `weights.transport: ipc` is refused (`weights.direct_transport.plain_handle`).
"""
OWN = frozenset({"_parameters", "_buffers", "training"})
"""Attributes that a layer and its copy never share; see `copy_without_parameters`."""

Layer = TypeVar("Layer", bound=nn.Module)


def onednn_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, n] a b' + bias in float32 on a CPU, from a [m, k], b [n, k] and bias [n].

    Source: 2.13.0, torch/_inductor/fx_passes/mkldnn_fusion.py, by which compiled models call it.
    Missing: `torch.nn.functional.linear` uses MKL for float32; no setting selects oneDNN.
    Otherwise: learners on CPUs fail in their first pass.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result


def copy_without_parameters(layer: Layer) -> Layer:
    """A copy of a layer that shares everything with it but has no parameters yet; absent ones (None) stay absent.

    Source: 2.13.0, torch/nn/modules/module.py (`_parameters`, `_buffers`).
    Missing: `copy.copy` shares the dictionary of parameters, `copy.deepcopy` copies the tensors.
    Otherwise: publications to generators on CPUs fail.
    """
    copy = layer.__new__(type(layer))
    copy.__dict__.update(layer.__dict__)
    copy._parameters = {name: None for name, parameter in layer._parameters.items() if parameter is None}
    copy._buffers = dict(layer._buffers)
    return copy


def swap_parameters(one: nn.Module, other: nn.Module) -> None:
    """Exchange all parameters of two layers.

    Source: 2.13.0, torch/nn/modules/module.py (`_parameters`).
    Missing: registering each parameter takes part of the pause in which the weights change.
    Otherwise: generators on CPUs keep their old weights, which the next publication's check reports.
    """
    one._parameters, other._parameters = other._parameters, one._parameters
