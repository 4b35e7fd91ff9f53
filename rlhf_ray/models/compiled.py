"""Decoder layers that are compiled, so that steps between matrix products become few kernels and most of what they read
and write stays on the chip.

Each layer is compiled whole where it is one graph for all sizes: attention is then an operator in it (`attention`).
Where it is not, as with experts whose numbers of tokens only the device knows, and with loops over tokens, its norms
and MLPs are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhf_ray.errors import ModelError
from rlhf_ray.internals.torch import compile_each, no_more_graphs, undo_compilation, whole_graphs
from rlhf_ray.internals.transformers import decoder_layers
from rlhf_ray.models.cpu.linear import use_onednn, use_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REASON = 300
"""Most letters of a compiler's message that are shown; its first line alone rarely says what happened."""


@dataclass(frozen=True)
class CompiledLayers:
    """What is compiled of a model."""

    layers: int
    """Number of its decoder layers."""
    parts: int = 0
    """Number of norms and MLPs, if the layers are not compiled whole."""
    reason: str = ""
    """Why they are not."""

    @property
    def note(self) -> str:
        """The same in words."""
        if not self.reason:
            return f"{self.layers} layers are compiled, each as a whole"
        what = f"{self.parts} norms and MLPs of {self.layers} layers are" if self.parts else "no layer is"
        return f"{what} compiled: a whole layer is not one graph for all sizes ({self.reason})"


def compile_layers(model: "PreTrainedModel", trial: Callable[[bool], None], required: bool = False) -> CompiledLayers:
    """Compile a model's decoder layers in place; names of parameters stay.

    Args:
        trial: passes of all layers, with gradients and without, over a usual number of tokens; over fewer and shorter
            rows if the argument is true. They compile the layers; later passes compile what other ways of computing
            need.
        required: the configuration says to compile.

    Raises:
        torch.OutOfMemoryError: the trial does not fit.
        ModelError: nothing can be compiled, and it is required.
    """
    layers = decoder_layers(model)
    for layer in layers:
        use_torch(layer)
    compile_each(layers)
    try:
        if layers:
            with whole_graphs():
                trial(False)
            with no_more_graphs():
                trial(True)
            return CompiledLayers(len(layers))
        reason = "there is none"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise all kinds; what is wrong with the model fails again below
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:REASON]}"
    undo_compilation(layers)
    use_onednn(model)
    parts = [part for layer in layers for part in _parts(layer)]
    for part in parts:
        use_torch(part)
    if required and not parts:
        raise ModelError(f"compile_layers=true finds nothing to compile in {type(model).__name__}: no layer is one "
                         f"graph for all sizes ({reason}), and none has norms or MLPs; set it to false")
    compile_each(parts)
    if parts:
        trial(False)
    return CompiledLayers(len(layers), len(parts), reason)


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    """Children that are neither attention nor experts: how many tokens an expert gets is known only to the device."""
    for child in layer.children():
        attention = any(hasattr(module, "is_causal") for module in child.modules())
        experts = any(isinstance(module, nn.ModuleList) for module in child.modules()) or any(
            parameter.dim() > 2 for parameter in child.parameters())
        if not attention and not experts and any(True for _ in child.parameters()):
            yield child
