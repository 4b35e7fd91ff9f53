"""Linear layers in float32 on CPUs with AVX-512, computed by oneDNN.

On CPUs torch computes float32 matrix products with MKL, which uses AVX-512 on Intel's processors only: 95 GFLOP/s on a
core of a Zen 5 EPYC, where oneDNN, which torch includes, reaches 200. The products differ only in the order of
summation.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rlhf_ray.internals.torch import onednn_product
from rlhf_ray.models.cpu.kernel_choice import takes_cpu_kernel, uses_onednn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST = 16
"""Smallest number of outputs for which calling oneDNN pays off; a scalar head is left as it is."""
SHAPES = 32
"""Number of sizes that `rounded_up` returns between a power of two and the next."""


class OneDNNLinear(nn.Linear):
    """A linear layer that uses oneDNN for float32 on a CPU without autocast, and torch otherwise."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        if not (takes_cpu_kernel(input, self.weight) and input.numel()):  # oneDNN raises an error for an empty input
            return linear(input, self.weight, self.bias)
        output: Tensor = _Linear.apply(input.reshape(-1, self.in_features), self.weight, self.bias)
        return output.view(*input.shape[:-1], self.out_features)


class _Linear(torch.autograd.Function):
    """y = x W' + b with x [T, in], W [out, in]; dx = g W, dW = g' x, db = sum of g over T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (onednn_product(grad, weight.t()) if for_x else None, _weight_gradient(grad, x) if for_weight else None,
                grad.sum(0) if for_bias else None)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[out, in] from grad [T, out] and x [T, in]. oneDNN copies a transposed first factor: use the smaller one."""
    return onednn_product(grad.t(), x.t()) if grad.shape[1] <= x.shape[1] else onednn_product(x.t(), grad.t()).t()


def use_onednn(model: "PreTrainedModel") -> "PreTrainedModel":
    """Make the linear layers of a model use oneDNN if `uses_onednn`; returns the same model. Elsewhere they stay
    `nn.Linear`; libraries for GPUs check for that exact class."""
    if uses_onednn():
        for layer in model.modules():
            if type(layer) is nn.Linear and layer.out_features >= SMALLEST:
                layer.__class__ = OneDNNLinear
    return model


def use_torch(module: nn.Module) -> None:
    """Undo `use_onednn` for the layers in a module: the compiler knows torch's own only."""
    for layer in module.modules():
        if type(layer) is OneDNNLinear:
            layer.__class__ = nn.Linear


def filler_of(tokens: Tensor) -> int:
    """Number of unused tokens to append after the last row, so that shapes repeat for oneDNN (see `rounded_up`)."""
    return rounded_up(len(tokens)) - len(tokens) if tokens.is_cpu and uses_onednn() else 0


def rounded_up(tokens: int) -> int:
    """`tokens` rounded up by at most a thirty-second, so that few different sizes occur.

    oneDNN compiles and caches code for every new shape: half a millisecond for each
    product, several for a pass of a small model. Without rounding no two micro-batches have the same number of tokens.
    """
    step = max(1, (1 << (tokens - 1).bit_length()) // (2 * SHAPES)) if tokens else 1
    return -(-tokens // step) * step
