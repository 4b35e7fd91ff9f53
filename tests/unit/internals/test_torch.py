"""torch's internals are as `rlhf_ray.internals.torch` describes them."""

import inspect

import torch
from torch import nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlhf_ray.internals.torch import HANDLE, OWN, copy_without_parameters, onednn_product, swap_parameters


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
