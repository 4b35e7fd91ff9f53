"""A number whose gradient is none, for what must notice it."""

from typing import Any

import torch


class NoNumber(torch.autograd.Function):
    """The same number with a gradient that is none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")
