"""One pass of a module as a probe makes it: answers and a sample of gradients, with nothing left behind.

Gradients come out of `torch.autograd.grad`: what DeepSpeed and the optimizer add them up in is not touched. Those of
the embedding's output have gone through every layer; those of weights are taken of the first and the last block and of
what lies outside the blocks, since all weights' would be another copy of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SAMPLED = 4096
"""Most entries of a gradient that are kept."""
COLUMNS = 64
"""Most columns of the embedding's gradient that are kept."""
EMBEDDED = "the embedding's output"


@dataclass(frozen=True)
class PassResult:
    """What a pass gave."""

    columns: tuple[Tensor, ...]
    """[n] float32 each: answers at the positions compared."""
    gradients: dict[str, Tensor]
    """By name, a sample of each; the embedding's as `[t, columns]`. Empty where none were asked for."""

    @classmethod
    def joined(cls, parts: Sequence["PassResult"]) -> "PassResult":
        """That of rows which went through in several passes, from theirs."""
        names = {name: None for part in parts for name in part.gradients}  # a part may not reach every expert
        found = {name: [part.gradients[name] for part in parts if name in part.gradients] for name in names}
        gradients = {name: torch.cat(each) if name == EMBEDDED else torch.stack(each).sum(0)
                     for name, each in found.items()}
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(tuple(torch.cat(column) for column in columns), gradients)


def run_pass(
    module: nn.Module, run: Callable[[], tuple[Tensor, ...]], cells: Tensor, weights: Tensor | None,
    rounding: float = 0.0,
) -> PassResult:
    """Run a pass.

    Args:
        run: gives [n] columns.
        cells: [t] where the tokens lie in what the flattened embedding is given.
        weights: [columns, n] by which the answers are added up to the number whose gradients are taken; None for none.
        rounding: what the embedding gives is made larger or smaller by up to this share.
    """
    with _embedding_as_leaf(module.model, rounding) as leaves:
        columns = run()
    if weights is None:
        return PassResult(tuple(column.float() for column in columns), {})
    names, parameters = zip(*_sampled_parameters(module), strict=True)
    (leaf,) = leaves
    of_leaf, *gradients = torch.autograd.grad(
        columns, (leaf, *parameters), [w.to(c.dtype) for w, c in zip(weights, columns, strict=True)], allow_unused=True)
    width = leaf.shape[-1]
    some = torch.from_numpy(np.linspace(0, width - 1, min(COLUMNS, width)).astype(np.int64)).to(leaf.device)
    found = {EMBEDDED: of_leaf.reshape(-1, width).index_select(0, cells).index_select(1, some).float()}
    found |= {name: _sample(g).float() for name, g in zip(names, gradients, strict=True) if g is not None}
    return PassResult(tuple(column.detach().float() for column in columns), found)


@contextmanager
def dropout_disabled(module: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped at random, and layers that are computed again in the backward pass still are."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    modes = {layer: layer.training for layer in module.modules()}
    dropped: list[tuple[nn.Module, str, float]] = []
    try:
        for layer in modes:
            layer.training = isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
            if layer.training:  # some drop by a number of their own, by the same mark
                dropped += [(layer, name, value) for name, value in vars(layer).items()
                            if "dropout" in name and isinstance(value, float)]
        for layer, name, _ in dropped:
            setattr(layer, name, 0.0)
        yield
    finally:
        for layer, name, value in dropped:
            setattr(layer, name, value)
        for layer, mode in modes.items():
            layer.training = mode


@contextmanager
def logits_in_pieces(module: Any, elements: int) -> Iterator[None]:
    """Inside, a module that makes logits makes so many entries of them at a time."""
    chunks = getattr(module, "chunks", None)
    try:
        if chunks is not None:
            module.chunks = replace(chunks, elements=elements, most_tokens=None)
        yield
    finally:
        if chunks is not None:
            module.chunks = chunks


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling the module (under whatever hooks it has) runs `forward`."""
    own = vars(module).get("forward")
    try:
        module.forward = forward
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def _embedding_as_leaf(model: Any, rounding: float) -> Iterator[list[Tensor]]:
    """Inside, gradients begin at what the embedding gives, which is put into the list."""
    leaves: list[Tensor] = []

    def cut(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        leaf = output.detach()
        if rounding:
            own = torch.Generator(leaf.device).manual_seed(0)
            leaf = leaf * (1 + rounding * (2 * torch.rand(leaf.shape, generator=own, device=leaf.device) - 1))
        leaves.append(leaf.to(output.dtype).requires_grad_(torch.is_grad_enabled()))
        return leaves[-1]

    hook = model.get_input_embeddings().register_forward_hook(cut)
    try:
        yield leaves
    finally:
        hook.remove()


def _sampled_parameters(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Those under training in the first and the last block, and outside the blocks."""
    blocks = next((layer for layer in module.model.modules() if isinstance(layer, nn.ModuleList)), nn.ModuleList())
    inner = {p for block in list(blocks)[1:-1] for p in block.parameters()}
    yield from ((name, p) for name, p in module.named_parameters() if p.requires_grad and p not in inner)


def _sample(gradient: Tensor) -> Tensor:
    """The same entries of every gradient of this size."""
    flat = gradient.reshape(-1)
    if len(flat) <= SAMPLED:
        return flat
    places = np.random.default_rng(len(flat)).integers(0, len(flat), SAMPLED)
    return flat.index_select(0, torch.from_numpy(places).to(flat.device))
