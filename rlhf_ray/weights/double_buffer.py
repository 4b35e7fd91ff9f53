"""A second set of a model's weights on CPUs: filled while the first one serves, then put in its place at once.

vLLM's own update stops the model, and then copies and packs every layer. Here that happens layer by layer beside the
running model, as the tensors arrive. What is left for the pause between two tokens is to exchange references. The price
is memory: until then the process holds its weights twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rlhf_ray.errors import WeightsError
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.loader_routes import Routes
from rlhf_ray.weights.manifest import unpack

OWN = frozenset({"_parameters", "_buffers", "training"})
"""Attributes of a twin that are its own from the start."""
CACHE_LINE = 64
"""Bytes."""


@dataclass
class LayerCopy:
    """A layer's double: everything else is shared, its parameters are its own."""

    layer: nn.Module
    double: nn.Module
    made: dict[str, Any]
    """Attributes that processing gave the double, such as the function that multiplies with its packed weights."""

    def process(self) -> None:
        """Let vLLM make of the loaded parameters what it computes with."""
        before = dict(self.double.__dict__)
        method = getattr(self.double, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            self.double.__dict__.pop("_already_called_process_weights_after_loading", None)
            method.process_weights_after_loading(self.double)
        self.made = {name: value for name, value in self.double.__dict__.items()
                     if name not in OWN and before.get(name) is not value}

    def exchange(self) -> None:
        """Give the layer what the double has, and the double what the layer had."""
        layer, double = self.layer.__dict__, self.double.__dict__
        layer["_parameters"], double["_parameters"] = double["_parameters"], layer["_parameters"]
        for name, value in self.made.items():
            self.made[name] = layer.get(name)
            layer[name] = double[name] = value


class DoubleBuffer:
    """One publication's weights beside a running model; a `receiver.Stage`."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._twins: dict[str, LayerCopy] = {}
        self._missing: dict[str, set[str]] = {}
        self._has_head = any(isinstance(layer, ParallelLMHead) for layer in routes.layers.values())

    def add(self, tensors: Iterable[tuple[TensorEntry, NDArray[np.uint8]]]) -> None:
        """Load tensors, and process the layers that are complete with them."""
        for name, tensor in unpack(tensors):
            for route in self._routes.of(name, tensor):
                twin = self._twin(route.layer)
                parameter = twin.double._parameters[route.parameter]
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                loader(parameter, route.tensor, *route.arguments, **route.keywords)
                self._missing[route.layer].discard(name)
                if not self._missing[route.layer]:
                    self._complete(route.layer)

    def require_complete_layers(self) -> None:
        """Raise unless every layer got all of its tensors, or none.

        Raises:
            WeightsError: names a layer that did not.
        """
        for layer, names in self._missing.items():
            if names:
                raise WeightsError(f"layer {layer!r} was to change without {', '.join(sorted(names))}, which it is "
                                   "made of too")

    def exchange(self) -> None:
        """Put the new weights in service; the old ones are freed with this object."""
        for twin in self._twins.values():
            twin.exchange()

    def _twin(self, path: str) -> LayerCopy:
        if path not in self._twins:
            self._twins[path] = copy_layer(self._routes.layers[path])
            self._missing[path] = set(self._routes.sources(path))
        return self._twins[path]

    def _complete(self, path: str) -> None:
        """Process a layer, and what shares a parameter with it: a head that is tied to the embedding."""
        twin = self._twins[path]
        for tie in self._routes.ties.get(path, ()):
            shared = {tie.name_there: twin.double._parameters[tie.name]}
            self._twins[tie.other] = copy_layer(self._routes.layers[tie.other], shared)
            self._twins[tie.other].process()
        # Where there is a head, nothing multiplies with the embedding, and packing it would be for nothing.
        if isinstance(twin.layer, ParallelLMHead) or not (
            self._has_head and isinstance(twin.layer, VocabParallelEmbedding)
        ):
            twin.process()


def copy_layer(layer: nn.Module, given: dict[str, Any] | None = None) -> LayerCopy:
    """A double of `layer` with empty parameters as a checkpoint fills them, and `given` ones as they are."""
    double = layer.__new__(type(layer))
    double.__dict__.update(layer.__dict__)
    double._parameters = {name: None for name, parameter in layer._parameters.items() if parameter is None}
    double._buffers = dict(layer._buffers)
    shapes: dict[str, Tensor] = get_layerwise_info(layer).restore_metadata[0]
    for name, own in layer._parameters.items():
        if own is not None and name not in shapes:
            shapes = {**shapes, name: to_meta_tensor(own)}
    for name, shape in shapes.items():
        parameter = (given or {}).get(name)
        if parameter is None:
            # Bound to the layer: what is bound to a double would keep the weights that it ends with alive.
            parameter = restore_layer_refs(materialize_meta_tensor(shape), layer)
            if isinstance(layer, LinearBase):
                spread_rows(parameter)
        double.register_parameter(name, parameter)
    return LayerCopy(layer, double, {})


def spread_rows(parameter: Tensor) -> None:
    """Lay a float32 matrix out with a cache line of room after each row.

    Packing reads a column of rows at a time. Where rows lie a power of two of bytes apart, as in most models, all of
    them compete for the same few places in the processor's caches: with the room packing takes about 0.6 of the time.
    (Kernels that vLLM packs other dtypes for want matrices without gaps.)
    """
    if parameter.ndim == 2 and parameter.dtype is torch.float32:
        rows, columns = parameter.shape
        parameter.data = torch.empty(rows, columns + CACHE_LINE // parameter.itemsize)[:, :columns]
