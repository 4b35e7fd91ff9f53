"""Layers whose norms and MLPs are compiled: element-wise steps between matrix products become one kernel each.

Attention stays as it is: it has kernels of its own, and reads how rows are packed from Python objects.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from rlhf_ray.errors import ModelError
from rlhf_ray.internals.transformers import decoder_layers
from rlhf_ray.models.cpu.linear import use_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_layers(model: "PreTrainedModel") -> int:
    """Compile the norms and MLPs of all layers, in place; names of parameters stay. Returns their number.

    Sizes are symbolic from the first call on, so a resumed run has the kernels of an uninterrupted one. Compiling takes
    place in the first passes; layers of one shape share it.

    Raises:
        ModelError: no layer has a part that can be compiled.
    """
    parts = [part for layer in decoder_layers(model) for part in _parts(layer)]
    if not parts:
        raise ModelError(f"compile_layers=true finds neither norms nor MLPs in the layers of {type(model).__name__}; "
                         "set it to false")
    for part in parts:
        use_torch(part)
        part.compile(dynamic=True)
    return len(parts)


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    """Children that are neither attention nor experts: how many tokens an expert gets is known only to the device."""
    for child in layer.children():
        attention = any(hasattr(module, "is_causal") for module in child.modules())
        experts = any(isinstance(module, nn.ModuleList) for module in child.modules()) or any(
            parameter.dim() > 2 for parameter in child.parameters())
        if not attention and not experts and any(True for _ in child.parameters()):
            yield child
