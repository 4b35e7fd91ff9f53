"""Linear layers of models on CPUs, in float32, by oneDNN.

For float32 torch sends matrix products on CPUs to MKL, which on processors of other makers than Intel leaves half of
their vector units idle: 95 GFLOP/s on a core of a Zen 5 EPYC, where oneDNN, which torch carries along, makes 200. The
products are the same but for the order of their sums.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST = 16
"""Outputs of a layer from which oneDNN is worth its call; a scalar head stays as it is."""


class OneDNNLinear(nn.Linear):
    """A linear layer that oneDNN computes where it can: float32 on a CPU, no autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        if not self._by_onednn(input):
            return linear(input, self.weight, self.bias)
        output: Tensor = _Linear.apply(input.reshape(-1, self.in_features), self.weight, self.bias)
        return output.view(*input.shape[:-1], self.out_features)

    def _by_onednn(self, input: Tensor) -> bool:
        """Whether this is its case; of no rows at all it makes an error."""
        return (input.is_cpu and input.dtype is self.weight.dtype is torch.float32 and input.numel() > 0
                and not torch.is_autocast_enabled("cpu"))


class _Linear(torch.autograd.Function):
    """y = x W' + b with x [T, in], W [out, in]; dx = g W, dW = g' x, db = sum of g over T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (_product(grad, weight.t()) if of_x else None, _weight_gradient(grad, x) if of_weight else None,
                grad.sum(0) if of_bias else None)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[out, in] from grad [T, out] and x [T, in]. oneDNN copies its first factor if it is transposed: the smaller."""
    return _product(grad.t(), x.t()) if grad.shape[1] <= x.shape[1] else _product(x.t(), grad.t()).t()


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, n] a b' + bias of a [m, k] and b [n, k]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result


def use_onednn(model: "PreTrainedModel") -> "PreTrainedModel":
    """Let oneDNN compute the model's linear layers, where this torch has it and the process computes on CPUs; returns
    the model, changed in place. On a GPU layers stay `nn.Linear`, which libraries know by their exact class."""
    if torch.backends.mkldnn.is_available() and not torch.cuda.is_available():
        for layer in model.modules():
            if type(layer) is nn.Linear and layer.out_features >= SMALLEST:
                layer.__class__ = OneDNNLinear
    return model
