"""Where a model's own loader puts each tensor of a checkpoint, recorded by loading meta tensors.

vLLM's models fuse and rename a checkpoint's tensors (`q_proj`, `k_proj` and `v_proj` become one `qkv_proj`), and only
their `load_weights` knows how. Calling it takes most of a millisecond per tensor, so its calls are recorded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


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
    """The routes of all tensors with these names and shapes into `model`, whose weights are not changed."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        self.layers = dict(model.named_modules())
        """All layers of the model by path."""
        self.ties = _ties(self.layers)
        """By the path of the layer that tensors are routed to."""
        self._known: dict[str, list[Route]] = {}
        self._sources: dict[str, set[str]] = {}
        with recorded_loaders(model) as calls:
            for name, shape in shapes.items():
                tensor = torch.empty(shape, device="meta")
                routes = _record_calls(model, calls, name, tensor)
                for route in routes:
                    self._sources.setdefault(route.layer, set()).add(name)
                if all(route.tensor is tensor for route in routes):
                    self._known[name] = routes

    def sources(self, layer: str) -> set[str]:
        """Names of the checkpoint's tensors that a layer consists of."""
        return self._sources[layer]

    def of(self, name: str, tensor: Tensor) -> list[Route]:
        """The loader calls for `tensor`. If the model transforms it first, it goes through `load_weights` again.

        The parameters' own loaders are restored on return, because copies of parameters copy their loaders.
        """
        if name in self._known:
            return [Route(route.layer, route.parameter, tensor, route.arguments, route.keywords)
                    for route in self._known[name]]
        with recorded_loaders(self._model) as calls:
            return _record_calls(self._model, calls, name, tensor)


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
    model.load_weights([(name, tensor)])  # type: ignore[operator]
    return list(calls)


@contextmanager
def recorded_loaders(model: nn.Module) -> Iterator[list[Route]]:
    """Inside, the weight loaders of `model` record their calls and load nothing."""
    calls: list[Route] = []
    before: list[tuple[nn.Parameter, Any]] = []
    seen: set[int] = set()
    for path, layer in model.named_modules():
        for name, parameter in own_parameters(layer):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                before.append((parameter, getattr(parameter, "weight_loader", None)))
                parameter.weight_loader = _recorder(calls, path, name)
    try:
        yield calls
    finally:
        for parameter, loader in before:
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader


def _recorder(calls: list[Route], layer: str, parameter: str) -> Callable[..., bool]:
    def note(_: nn.Parameter, tensor: Tensor, *arguments: Any, **keywords: Any) -> bool:
        calls.append(Route(layer, parameter, tensor, arguments, keywords))
        return True  # loaders of experts return whether they took the tensor

    return note
