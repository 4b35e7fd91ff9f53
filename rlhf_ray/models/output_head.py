"""Logits of given hidden states, computed as the model computes them from its backbone's output.

Families differ there: soft-caps, scales, biases, further layers. So the family's forward pass itself runs, on a shallow
copy of the model whose backbone returns the given states instead of computing some.
"""

from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlhf_ray.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _BackboneOutput:
    """A backbone's output that has nothing but last hidden states: every other part is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, part: int | slice) -> Any:
        return (self.last_hidden_state,)[part]

    def __getattr__(self, name: str) -> None:
        return None


class _GivenStates:
    """Replaces a backbone: a call returns the states, and attributes are those of the backbone."""

    def __init__(self, backbone: nn.Module, states: Tensor) -> None:
        self._backbone, self.states, self.calls = backbone, states, 0

    def __call__(self, *_: Any, **__: Any) -> _BackboneOutput:
        self.calls += 1
        return _BackboneOutput(self.states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)


def logits_of(model: "PreTrainedModel", states: Tensor) -> Tensor:
    """[n, V] logits of the backbone's last hidden states `[n, hidden]`.

    Raises:
        ModelError: the model's forward pass does not call its backbone once.
    """
    backbone = model.get_decoder()
    given = _GivenStates(backbone, states[None])
    logits: Tensor = _with_module(model, list(_path(model, backbone)), given).forward(
        inputs_embeds=given.states, use_cache=False).logits
    if given.calls != 1:
        raise ModelError(f"{type(model).__name__} does not call its backbone {type(backbone).__name__} once in a "
                         "forward pass; use a model of a supported family (docs/models.md)")
    return logits.squeeze(0)  # a view; the backward pass of an index fills a gradient of this size with zeros


def _path(model: nn.Module, part: nn.Module) -> Iterator[str]:
    """The attributes that lead from a model to one of its modules."""
    name = next((name for name, module in model.named_modules() if module is part), "")
    return filter(None, name.split("."))


def _with_module(model: Any, path: list[str], module: Any) -> Any:
    """A copy of the model that has `module` at this path and shares all else with it."""
    if not path:
        return module
    changed = copy(model)
    # An attribute of its own comes before the registered module of that name, which the original keeps.
    vars(changed)[path[0]] = _with_module(getattr(model, path[0]), path[1:], module)
    return changed
