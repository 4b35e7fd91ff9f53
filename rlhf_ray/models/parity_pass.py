"""One pass of a module for the parity probe: its outputs and a sample of gradients, without side effects.

Gradients come from `torch.autograd.grad`, so the buffers of DeepSpeed and the optimizer are not touched. The gradient
of the embedding's output depends on every layer. Weight gradients are taken from the first and the last block and from
parameters outside the blocks; gradients of all weights would be another copy of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_ray.internals.transformers import is_checkpointed
from rlhf_ray.models.loading import randomness

SAMPLED = 4096
"""Maximum number of elements kept of a gradient."""
COLUMNS = 64
"""Maximum number of columns kept of the embedding's gradient."""
EMBEDDED = "the embedding's output"


@dataclass(frozen=True)
class PassResult:
    """Outputs and gradients of a pass."""

    columns: tuple[Tensor, ...]
    """[n] float32 each: outputs at the compared positions."""
    gradients: dict[str, Tensor]
    """A sample of each gradient by name; the embedding's as `[t, columns]`. Empty if none were requested."""

    @classmethod
    def concat(cls, parts: Sequence["PassResult"]) -> "PassResult":
        """The result for all rows, from passes over some of them each."""
        names = {name: None for part in parts for name in part.gradients}  # a part may not reach every expert
        by_name = {name: [part.gradients[name] for part in parts if name in part.gradients] for name in names}
        gradients = {name: torch.cat(each) if name == EMBEDDED else torch.stack(each).sum(0)
                     for name, each in by_name.items()}
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(tuple(torch.cat(column) for column in columns), gradients)


def run_pass(
    module: nn.Module, run: Callable[[], tuple[Tensor, ...]], cells: Tensor, weights: Tensor | None,
    rounding: float = 0.0,
) -> PassResult:
    """Run a pass.

    Args:
        run: returns [n] columns.
        cells: [t] positions of the tokens in the flattened input of the embedding.
        weights: [columns, n] weights of the sum of outputs whose gradients are taken; None for no gradients.
        rounding: the embedding's output is perturbed by up to this relative amount.
    """
    with embedding_as_leaf(module.model, rounding) as leaves:
        columns = run()
    if weights is None:
        return PassResult(tuple(column.float() for column in columns), {})
    names, parameters = zip(*_sampled_parameters(module), strict=True)
    (leaf,) = leaves
    of_leaf, *gradients = torch.autograd.grad(
        columns, (leaf, *parameters), [w.to(c.dtype) for w, c in zip(weights, columns, strict=True)], allow_unused=True)
    width = leaf.shape[-1]
    some = torch.from_numpy(np.linspace(0, width - 1, min(COLUMNS, width)).astype(np.int64)).to(leaf.device)
    sampled = {EMBEDDED: of_leaf.reshape(-1, width).index_select(0, cells).index_select(1, some).float()}
    sampled |= {name: _sample(g).float() for name, g in zip(names, gradients, strict=True) if g is not None}
    return PassResult(tuple(column.detach().float() for column in columns), sampled)


def _drops_something(module: Any) -> bool:
    """Whether something is random in training, as far as is known."""
    return bool(randomness(module.model.config.get_text_config())) or any(
        randomness(layer) or (isinstance(layer, nn.Dropout) and layer.p) for layer in module.modules())


@contextmanager
def dropout_disabled(module: Any, training: bool) -> Iterator[None]:
    """Inside, there is no dropout, but gradient checkpointing stays active.

    Args:
        training: if no layer drops anything, all are in training, so that the graphs of compiled layers are those of
            updates.
    """
    modes = {layer: layer.training for layer in module.modules()}
    dropped: list[tuple[nn.Module, str, float]] = []
    training = training and not _drops_something(module)
    try:
        for layer in modes:
            layer.training = training or is_checkpointed(layer)
            if layer.training:  # some layers apply dropout themselves when `training` is set
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
    """Inside, a module that computes logits does so in chunks of at most `elements` elements."""
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
    """Inside, calling the module runs `forward`; the module's hooks still run."""
    own = vars(module).get("forward")
    try:
        module.forward = forward
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def embedding_as_leaf(model: Any, rounding: float) -> Iterator[list[Tensor]]:
    """Inside, the embedding's output is a leaf of the graph, which is appended to the yielded list.

    Args:
        rounding: the output is perturbed by up to this relative amount.
    """
    leaves: list[Tensor] = []

    def cut(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        leaf = output.detach()
        if rounding:
            generator = torch.Generator(leaf.device).manual_seed(0)
            leaf = leaf * (1 + rounding * (2 * torch.rand(leaf.shape, generator=generator, device=leaf.device) - 1))
        leaves.append(leaf.to(output.dtype).requires_grad_(torch.is_grad_enabled()))
        return leaves[-1]

    hook = model.get_input_embeddings().register_forward_hook(cut)
    try:
        yield leaves
    finally:
        hook.remove()


def _sampled_parameters(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters in the first and the last block, and outside the blocks."""
    blocks = next((layer for layer in module.model.modules() if isinstance(layer, nn.ModuleList)), nn.ModuleList())
    inner = {p for block in list(blocks)[1:-1] for p in block.parameters()}
    yield from ((name, p) for name, p in module.named_parameters() if p.requires_grad and p not in inner)


def _sample(gradient: Tensor) -> Tensor:
    """A sample of elements, the same ones for every gradient of this size."""
    flat = gradient.reshape(-1)
    if len(flat) <= SAMPLED:
        return flat
    places = np.random.default_rng(len(flat)).integers(0, len(flat), SAMPLED)
    return flat.index_select(0, torch.from_numpy(places).to(flat.device))
