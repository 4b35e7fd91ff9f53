"""A second set of a model's weights on CPUs: filled while the first one is in use, then swapped with it.

vLLM's own update stops the model, then copies and packs every layer. Here layers are loaded and packed as their tensors
arrive, while the model runs. The pause between two tokens only swaps references. The cost is memory: until the swap the
process holds its weights twice.
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
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rlhf_ray.errors import WeightsError
from rlhf_ray.internals.torch import OWN, copy_without_parameters, swap_parameters
from rlhf_ray.internals.vllm import (
    REFERENCED,
    checkpoint_parameters,
    derive_weights,
    empty_parameter,
    process_weights,
)
from rlhf_ray.records import TensorEntry
from rlhf_ray.weights.manifest import unpack
from rlhf_ray.weights.weight_loaders import Routes, own_parameters

CACHE_LINE = 64
"""Bytes."""


@dataclass
class LayerCopy:
    """A layer and a copy of it with parameters of its own; everything else is shared."""

    layer: nn.Module
    copy: nn.Module
    processed: dict[str, Any]
    """Attributes that processing set on the copy, such as the function that multiplies with its packed weights."""

    def process(self) -> None:
        """Let vLLM process the loaded parameters into the form it computes with."""
        before = dict(self.copy.__dict__)
        process_weights(self.copy)
        self.processed = {name: value for name, value in self.copy.__dict__.items()
                          if name not in OWN and before.get(name) is not value}

    def swap(self) -> None:
        """Swap the parameters and processed attributes of the layer and its copy. Parameters that others refer to stay
        the same objects, with other values."""
        layer, copy = self.layer.__dict__, self.copy.__dict__
        swap_parameters(self.layer, self.copy)
        for name in REFERENCED & dict(own_parameters(self.layer)).keys():
            new, old = self.layer.get_parameter(name), self.copy.get_parameter(name)
            new.data, old.data = old.data, new.data
            self.layer.register_parameter(name, old)
            self.copy.register_parameter(name, new)
        for name, value in self.processed.items():
            self.processed[name] = layer.get(name)
            layer[name] = copy[name] = value


class DoubleBuffer:
    """One publication's weights next to a running model's; a `receiver.Stage`.

    Args:
        threads: number of threads that the model computes with. oneDNN chooses the layout of packed weights by the
            number of threads of the thread that packs them, and on AVX2 the products of another layout are wrong: vLLM
            shares kernels among all matrices of a shape. (Example: 192x64 in float32, one thread and two.)
    """

    def __init__(self, routes: Routes, threads: int) -> None:
        self._routes, self._threads = routes, threads
        self._copies: dict[str, LayerCopy] = {}
        self._missing: dict[str, set[str]] = {}
        self._loaded: set[str] = set()
        self._has_head = any(isinstance(layer, ParallelLMHead) for layer in routes.layers.values())

    def add(self, tensors: Iterable[tuple[TensorEntry, NDArray[np.uint8]]]) -> None:
        """Load tensors, and process each layer once it is complete."""
        torch.set_num_threads(self._threads)  # of this thread, which may be any of a pool's
        for name, tensor in unpack(tensors):
            if name in self._loaded:  # its bucket was damaged further on, and was sent again
                continue
            routes = self._routes.of(name, tensor)
            for route in routes:
                copy = self._copy(route.layer)
                parameter = copy.copy.get_parameter(route.parameter)
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                loader(parameter, route.tensor, *route.arguments, **route.keywords)
            for layer in {route.layer: None for route in routes}:
                self._missing[layer].discard(name)
                if not self._missing[layer]:
                    self._complete(layer)
            self._loaded.add(name)

    def require_complete_layers(self) -> None:
        """Check that every layer received all of its tensors, or none.

        Raises:
            WeightsError: a layer received some of its tensors; the message names it.
        """
        for layer, names in self._missing.items():
            if names:
                raise WeightsError(f"layer {layer!r} received new weights without {', '.join(sorted(names))}, which "
                                   "belong to it; publish the weights whole")

    def swap(self) -> None:
        """Activate the new weights; the old ones are freed with this object."""
        for copy in self._copies.values():
            copy.swap()
        derive_weights(self._routes.layers.values(), {copy.layer for copy in self._copies.values()})

    def _copy(self, path: str) -> LayerCopy:
        if path not in self._copies:
            layer, loaded = self._routes.layers[path], self._routes.parameters(path)
            kept = {name: parameter for name, parameter in own_parameters(layer) if name not in loaded}
            self._copies[path] = copy_layer(layer, kept)
            self._missing[path] = set(self._routes.sources(path))
        return self._copies[path]

    def _complete(self, path: str) -> None:
        """Process a layer, and any layer that shares a parameter with it, such as a head tied to the embedding."""
        copy = self._copies[path]
        for tie in self._routes.ties.get(path, ()):
            other = self._copy(tie.other)
            other.copy.register_parameter(tie.other_name, copy.copy.get_parameter(tie.name))
            if not self._missing[tie.other]:  # else it is processed once its own parameters, such as a bias, are there
                other.process()
        # If the model has a head, nothing multiplies with the embedding, so packing it would be wasted.
        if isinstance(copy.layer, ParallelLMHead) or not (
            self._has_head and isinstance(copy.layer, VocabParallelEmbedding)
        ):
            copy.process()


def copy_layer(layer: nn.Module, shared: dict[str, Any] | None = None) -> LayerCopy:
    """A copy of `layer` with empty parameters in checkpoint format; those in `shared` are used as given."""
    copy = copy_without_parameters(layer)
    for name, shape in checkpoint_parameters(layer).items():
        parameter: Any = (shared or {}).get(name)
        if parameter is None:
            # Bound to the layer: a loader bound to the copy would keep the old weights alive after the swap.
            parameter = empty_parameter(shape, layer)
            if isinstance(layer, LinearBase):
                pad_rows(parameter)
        copy.register_parameter(name, parameter)
    return LayerCopy(layer, copy, {})


def pad_rows(parameter: Tensor) -> None:
    """Store a float32 matrix with a cache line of padding after each row.

    Packing reads down columns. If the row stride is a power of two bytes, as in most models, all rows compete for the
    same few cache sets; with the padding packing takes about 0.6 of the time. (vLLM's packing of other dtypes needs
    matrices without gaps.)
    """
    if parameter.ndim == 2 and parameter.dtype is torch.float32:
        rows, columns = parameter.shape
        parameter.data = torch.empty(rows, columns + CACHE_LINE // parameter.itemsize)[:, :columns]
