"""Where a model's own loader puts each tensor of a checkpoint, recorded by loading meta tensors.

vLLM's models fuse and rename a checkpoint's tensors (`q_proj`, `k_proj` and `v_proj` become one `qkv_proj`), and only
their `load_weights` knows how. Calling it takes most of a millisecond per tensor, so its calls are recorded once.
Publications have transformers' parameters, of which some are several tensors of a checkpoint: one for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_ray.internals.vllm import checkpoint_parameters, checkpoint_weights, load_checkpoint_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DIMENSIONS = ("input_dim", "output_dim")
"""Attributes of vLLM's parameters."""


@dataclass(frozen=True)
class Route:
    """One call of a parameter's weight loader: `loader(parameter, tensor, *arguments, **keywords)`."""

    layer: str
    """Path of the module that holds the parameter."""
    parameter: str
    tensor: Tensor = field(compare=False)
    """The loaded tensor: the checkpoint's, or the model's transformation of it."""
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tie:
    """A parameter shared with another layer, such as an embedding that is also the output head's weight."""

    name: str
    """Its name in the layer that tensors are routed to."""
    other: str
    """Path of the other layer."""
    other_name: str
    """Its name in the other layer."""


class Routes:
    """The routes of all parameters with these names and shapes into `model`, whose weights are not changed.

    Args:
        model: vLLM's.
        config: of transformers' model, whose parameters `shapes` has.
    """

    def __init__(self, model: nn.Module, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._config = model, config
        self.layers = dict(model.named_modules())
        """All layers of the model by path."""
        self._known: dict[str, list[Route]] = {}
        self._sources: dict[str, set[str]] = {}
        self._parameters: dict[str, set[str]] = {}
        with recorded_loaders(model) as calls:
            for name, shape in shapes.items():
                for part, tensor in self._parts(name, torch.empty(shape, device="meta")):
                    routes = _record_calls(model, calls, part, tensor)
                    for route in routes:
                        self._sources.setdefault(route.layer, set()).add(name)
                        self._parameters.setdefault(route.layer, set()).add(route.parameter)
                    if all(route.tensor is tensor for route in routes):
                        self._known[part] = routes
        self.ties = {path: [tie for tie in ties if tie.name in self._parameters.get(path, ())]
                     for path, ties in _ties(self.layers).items()}
        """By the path of the layer that tensors are routed to."""

    def sources(self, layer: str) -> set[str]:
        """Names of the parameters that a layer consists of, without those that it shares with another."""
        return self._sources.get(layer, set())

    def parameters(self, layer: str) -> set[str]:
        """Names of a layer's own parameters that are loaded. Others never change, such as a router's bias, or are those
        of another layer."""
        return self._parameters.get(layer, set())

    def of(self, name: str, tensor: Tensor) -> list[Route]:
        """The loader calls for `tensor`. If the model transforms it first, it goes through `load_weights` again.

        The parameters' own loaders are restored on return, because copies of parameters copy their loaders.
        """
        parts = self._parts(name, tensor)
        if all(part in self._known for part, _ in parts):
            return [Route(route.layer, route.parameter, value, route.arguments, route.keywords)
                    for part, value in parts for route in self._known[part]]
        with recorded_loaders(self._model) as calls:
            return [route for part in parts for route in _record_calls(self._model, calls, *part)]

    def _parts(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return list(checkpoint_weights(self._config, [(name, tensor)]))


def own_parameters(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of each of a layer's own parameters, without those of the layers inside it."""
    return layer.named_parameters(recurse=False, remove_duplicate=False)


def _ties(layers: Mapping[str, nn.Module]) -> dict[str, list[Tie]]:
    first: dict[int, tuple[str, str]] = {}
    ties: dict[str, list[Tie]] = {}
    for path, layer in layers.items():
        for name, parameter in own_parameters(layer):
            owner, own_name = first.setdefault(id(parameter), (path, name))
            if owner != path:
                ties.setdefault(owner, []).append(Tie(own_name, path, name))
    return ties


def _record_calls(model: nn.Module, calls: list[Route], name: str, tensor: Tensor) -> list[Route]:
    calls.clear()
    load_checkpoint_weights(model, [(name, tensor)])
    return list(calls)


@contextmanager
def recorded_loaders(model: nn.Module) -> Iterator[list[Route]]:
    """Inside, the weight loaders of `model` record their calls and load nothing.

    Parameters also get the dimensions that they had as the checkpoint was loaded: by these some models decide how they
    transform a tensor.
    """
    calls: list[Route] = []
    before: list[tuple[nn.Parameter, dict[str, Any]]] = []
    seen: set[int] = set()
    for path, layer in model.named_modules():
        as_loaded = checkpoint_parameters(layer)
        for name, parameter in own_parameters(layer):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                before.append((parameter, dict(parameter.__dict__)))
                for dimension in DIMENSIONS:
                    if hasattr(as_loaded[name], dimension) and not hasattr(parameter, dimension):
                        setattr(parameter, dimension, getattr(as_loaded[name], dimension))
                parameter.weight_loader = _recorder(calls, path, name)
    try:
        yield calls
    finally:
        for parameter, attributes in before:
            parameter.__dict__.clear()
            parameter.__dict__.update(attributes)


def _recorder(calls: list[Route], layer: str, parameter: str) -> Callable[..., bool]:
    def note(param: nn.Parameter, loaded_weight: Tensor, *arguments: Any, **keywords: Any) -> bool:
        calls.append(Route(layer, parameter, loaded_weight, arguments, keywords))
        return True  # loaders of experts return whether they took the tensor

    return note
