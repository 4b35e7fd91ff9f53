"""torch's internals are as `rlhf_ray.internals.torch` describes them."""

import inspect

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlhf_ray.internals.torch import (
    HANDLE,
    OWN,
    autograd_in_operator,
    compile_each,
    copy_without_parameters,
    onednn_product,
    swap_parameters,
    uncompiled,
    undo_compilation,
    whole_graphs,
)

compile_with = torch.compile


def test_memory_of_gpus_is_described_by_the_known_arguments():
    assert tuple(inspect.signature(rebuild_cuda_tensor).parameters) == HANDLE


def test_onednn_multiplies_as_torch_does_with_and_without_a_bias():
    a, b, bias = torch.randn(5, 24), torch.randn(17, 24), torch.randn(17)
    torch.testing.assert_close(onednn_product(a, b, bias), nn.functional.linear(a, b, bias), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(onednn_product(a, b), a @ b.t(), atol=1e-5, rtol=1e-5)


def test_a_copy_has_parameters_of_its_own_and_shares_all_else():
    layer = nn.BatchNorm1d(3)
    layer.register_parameter("absent", None)
    layer.note = object()
    copy = copy_without_parameters(layer)
    assert type(copy) is nn.BatchNorm1d and not list(copy.parameters()) and copy.absent is None
    assert copy.note is layer.note and copy.running_mean is layer.running_mean
    copy.register_parameter("weight", nn.Parameter(torch.zeros(3)))
    copy.register_buffer("more", torch.ones(1))
    assert layer.weight.tolist() == [1, 1, 1] and not hasattr(layer, "more")
    assert set(vars(layer)) >= OWN


def test_swapped_layers_compute_with_each_other_s_parameters():
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    x, before = torch.randn(4, 2), (one(torch.eye(2)), other(torch.eye(2)))
    swap_parameters(one, other)
    assert torch.equal(other(torch.eye(2)), before[0]) and torch.equal(one(torch.eye(2)), before[1])
    assert one(x).shape == (4, 3) and len(list(one.parameters())) == 2


def test_an_operator_can_compute_gradients():
    @torch.library.custom_op("rlhf_ray_tests::gradient_of_cube", mutates_args=())
    def gradient_of_cube(x: torch.Tensor) -> torch.Tensor:
        with autograd_in_operator():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad((leaf**3).sum(), leaf)[0]

    with torch.no_grad():
        assert gradient_of_cube(torch.tensor([2.0])).item() == 12
    x = torch.ones(2, requires_grad=True)
    assert (2 * x).requires_grad, "autograd goes on as before"


class Breaking(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


def test_what_is_compiled_can_be_told_undone_and_must_be_one_graph_where_asked(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_with(call, backend="eager"))
    whole, broken = nn.Linear(2, 2), Breaking()
    compile_each([whole, broken])
    with whole_graphs():
        whole(torch.ones(1, 2))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            broken(torch.ones(1))
    assert broken(torch.ones(1)) == 2, "elsewhere it may be several"
    with uncompiled(whole):
        assert whole._compiled_call_impl is None
    assert whole._compiled_call_impl is not None
    undo_compilation([whole])
    assert whole._compiled_call_impl is None
