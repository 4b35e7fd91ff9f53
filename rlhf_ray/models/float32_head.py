"""An output head whose logits are float32 in a model that computes in bfloat16 (MiniMax 2025, arXiv:2506.13585, section
3.2; Khatri et al. 2025, arXiv:2510.13786).

Logits of 20 to 30 are multiples of 1/8 in bfloat16. Learner and generator round them apart, and a ratio of their
probabilities inherits it. Here hidden states and weight are those of the generator, in bfloat16, and their product is
not rounded: products of bfloat16 numbers are exact in float32, so it differs by the order of summation only from the
product of both in float32, which needs a float32 copy of the weight (2 GiB for 128,000 tokens of width 4,096). GPUs
compute it from bfloat16 directly, as vLLM does there (model_executor/layers/logits_processor.py, `_apply_head`).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rlhf_ray.errors import ModelError
from rlhf_ray.models.cpu.kernel_choice import uses_onednn
from rlhf_ray.models.cpu.linear import OneDNNLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Float32Head(OneDNNLinear):
    """A linear layer that rounds states and weight where the layers before it do, to the precision of autocast or of
    the weight, and returns float32."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., out] float32 outputs of `[..., in]`; where nothing is in bfloat16, those of `nn.Linear`."""
        if _precision(self.weight) is not torch.bfloat16:
            # What `use_onednn` would have chosen.
            return super().forward(input) if uses_onednn() else linear(input, self.weight, self.bias)
        with _without_autocast(input):
            output: Tensor = _Product.apply(input.reshape(-1, self.in_features), self.weight)
            if self.bias is not None:
                output = output + self.bias.bfloat16().float()
        return output.view(*input.shape[:-1], self.out_features)


class ConvertedHead(nn.Linear):
    """What `Float32Head` computes, by its definition: rounded states and weight are converted to float32."""

    def forward(self, input: Tensor) -> Tensor:
        """As `Float32Head.forward`."""
        if _precision(self.weight) is not torch.bfloat16:
            return super().forward(input)
        with _without_autocast(input):
            bias = None if self.bias is None else self.bias.bfloat16().float()
            return linear(input.bfloat16().float(), self.weight.bfloat16().float(), bias)


class _Product(torch.autograd.Function):
    """y = x W' in float32 with x [T, in] and W [out, in] rounded to bfloat16; dx = g W, dW = g' x.

    On GPUs the gradient g of the logits is rounded, too, as that of every other product in bfloat16: products of
    float32 take 15 times as long there. Sums are float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rounded = x.bfloat16()
        ctx.save_for_backward(rounded, weight)
        ctx.precision = x.dtype
        return _product(rounded, weight.bfloat16().t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rounded, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        with _without_autocast(grad):
            g = grad.bfloat16() if grad.is_cuda else grad
            dx = _product(g, weight.bfloat16()).to(ctx.precision) if for_x else None
            dw = _product(g.t(), rounded).to(weight.dtype) if for_weight else None
        return dx, dw


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[n, m] float32 product of `[n, k]` and `[k, m]`, of which no element is rounded to bfloat16."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)  # only for bfloat16, and not on CPUs
    return a.float() @ b.float()


def _precision(weight: Tensor) -> torch.dtype:
    """The precision that a linear layer with this weight computes in."""
    kind = weight.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def use_float32_head(model: "PreTrainedModel", kind: type[nn.Linear] = Float32Head) -> None:
    """Compute a language model's logits in float32.

    Raises:
        ModelError: its output head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"model.float32_head=true computes a linear output head in float32, and that of "
                         f"{type(model).__name__} is {type(head).__name__}; leave it false")
    head.__class__ = kind
