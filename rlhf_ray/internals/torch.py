"""Internals of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

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

GRAPHS = 64
"""Most graphs of a function that is compiled."""
COMPILERS = 8
"""Most processes that compile for one learner."""

Layer = TypeVar("Layer", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])


def onednn_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, n] a b' + bias in float32 on a CPU, from a [m, k], b [n, k] and bias [n].

    Source: 2.13.0, torch/_inductor/fx_passes/mkldnn_fusion.py, by which compiled models call it.
    Missing: `torch.nn.functional.linear` uses MKL for float32; no setting selects oneDNN.
    Otherwise: learners on CPUs fail in their first pass.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result


@contextmanager
def autograd_in_operator() -> Iterator[None]:
    """Inside, autograd records operations although they are part of a custom operator, which is below autograd.

    Source: 2.13.0, torch/_library/autograd.py (`_C._AutoDispatchBelowAutograd`); torch/_prims_common/__init__.py sets
    the same state.
    Missing: an operator's backward pass has to be an operator too, and none can use autograd.
    Otherwise: learners with compiled layers fail in their first backward pass, if not all attention is by the kernel
    for rows of any length.
    """
    key = torch._C.DispatchKey.AutogradFunctionality
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


def constant_when_compiled(function: Function) -> Function:
    """A function whose result is a constant of what is compiled, as by `torch.compiler.assume_constant_result`.

    Source: 2.13.0, torch/_dynamo/decorators.py (`assume_constant_result`), and its copy in 2.11.0.
    Missing: the decorator imports torch's compiler, a third of the time in which the driver imports everything.
    Otherwise: learners with compiled layers fail when they start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def whole_graphs() -> AbstractContextManager[None]:
    """Inside, an error is raised by what compiles but is not one graph.

    Source: 2.13.0, torch/_dynamo/decorators.py (`error_on_graph_break`), and its copy in 2.11.0.
    Missing: `fullgraph=True` also raises it in later passes, when it is too late to compile something else.
    Otherwise: learners with compiled layers fail when they start.
    """
    import torch._dynamo

    context: AbstractContextManager[None] = torch._dynamo.error_on_graph_break(True)
    return context


def no_more_graphs() -> AbstractContextManager[None]:
    """Inside, an error is raised by a call that what was compiled before does not fit.

    Source: 2.13.0, torch/_dynamo/config.py (`error_on_recompile`), and its copy in 2.11.0.
    Missing: torch documents settings of the process, such as this one, by their source only.
    Otherwise: learners with compiled layers fail when they start.
    """
    import torch._dynamo

    context: AbstractContextManager[None] = torch._dynamo.config.patch(error_on_recompile=True)
    return context


def compile_each(modules: Iterable[nn.Module]) -> None:
    """Compile calls of these modules. Modules of one class share what is compiled. Sizes are symbols from the first
    call on, and no kernel is chosen by its time: a resumed run has the kernels of an uninterrupted one.

    Source: 2.13.0, torch/_dynamo/config.py (`recompile_limit`), torch/_inductor/config.py (`compile_threads`,
    `deterministic`), and their copies in 2.11.0.
    Missing: torch 2.11's `torch.compile` takes no limit of graphs. One for each way of computing (with gradients, in
    training, with adapters) and kind of layer would exceed the usual 8, and further ones would not be compiled. Each
    learner of a node would start as many processes as it has cores.
    Otherwise: learners with compiled layers fail when they start.
    """
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._inductor.config.compile_threads = min(torch._inductor.config.compile_threads or COMPILERS, COMPILERS)
    for module in modules:
        module.compile(dynamic=True, options={"deterministic": True})


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, no module of the model is compiled.

    Source: 2.13.0, torch/nn/modules/module.py (`compile`).
    Missing: `torch.compiler.set_stance` is for the whole process and does not allow calls inside others.
    Otherwise: the comparison of packed passes compiles transformers' own.
    """
    compiled = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def undo_compilation(modules: Iterable[nn.Module]) -> None:
    """Undo `compile_each`; see `uncompiled`."""
    for module in modules:
        module._compiled_call_impl = None


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
