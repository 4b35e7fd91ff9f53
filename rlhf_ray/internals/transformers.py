"""Internals of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

VERSION = "5.19.0"


def attention_implementation(model: PreTrainedModel) -> str:
    """The name that `set_attn_implementation` was given last.

    Source: 5.19.0, configuration_utils.py (`PreTrainedConfig._attn_implementation`).
    Missing: there is a setter, but no getter.
    Otherwise: workers fail before they start, when they compare packed passes with transformers' own.
    """
    name: str = model.config._attn_implementation
    return name


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Whether a family computes with torch's scaled-dot-product attention.

    Source: 5.19.0, modeling_utils.py (`PreTrainedModel._supports_sdpa`).
    Missing: `set_attn_implementation` raises an error for a family that does not, in words only.
    Otherwise: as in `attention_implementation`.
    """
    return bool(model._supports_sdpa)


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether a layer's activations are computed again in the backward pass (when it is in train mode).

    Source: 5.19.0, modeling_layers.py (`GradientCheckpointingLayer.gradient_checkpointing`).
    Missing: `PreTrainedModel.is_gradient_checkpointing` is about the whole model.
    Otherwise: the comparison of packed passes takes more memory than training, or has dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(layer, GradientCheckpointingLayer) and bool(layer.gradient_checkpointing)
