"""Which layers of a model get adapters; checks the configured names against the model."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import meta_model
from rlhf_ray.models.model_families import WITHOUT_ADAPTERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
HEAD = "score"
"""Name of a scalar model's head. It is new or nearly so, and is therefore trained in full."""


def check_targets(targets: list[str], model: ModelConfig, field: str, scalar: bool) -> None:
    """Reject names of layers that a model does not have, from its configuration alone; `all-linear` fits every model.

    Args:
        field: the configuration field that holds the targets.
        scalar: the model is trained with a scalar head in place of its output head.

    Raises:
        ModelError: names the field, the value and the layers that exist.
    """
    shape = pretrained_config(model)
    if targets == [ALL_LINEAR] and shape.model_type not in WITHOUT_ADAPTERS:
        return
    chosen_layers(meta_model(shape, model.trust_remote_code, scalar), targets, field)


def chosen_layers(model: "PreTrainedModel", targets: list[str], field: str = "lora.targets") -> list[str]:
    """Full names of the layers that `targets` match, in the model's order.

    A target is a suffix of a layer's name that begins after a dot: `q_proj` matches that layer of every block,
    `layers.0.self_attn.q_proj` that of the first.

    Raises:
        ModelError: a target is not a linear layer of the model, or is its scalar head or a head tied to the embedding;
            or the family does not compute with adapters.
    """
    if model.config.model_type in WITHOUT_ADAPTERS:
        raise ModelError(f"{field}={targets}: models of the family {model.config.model_type!r} cannot have adapters: "
                         "their mixers read the weights of layers without calling the layers, so adapters would be "
                         "left out; remove lora to train all weights")
    output = model.get_output_embeddings()
    layers = {name: layer for name, layer in linear_layers(model).items() if name != HEAD}
    if targets == [ALL_LINEAR]:
        return [name for name, layer in layers.items() if layer is not output]
    if _is_tied(model):
        layers = {name: layer for name, layer in layers.items() if layer is not output}
    for target in targets:
        if not any(_matches(target, name) for name in layers):
            raise ModelError(f"{field} names {target!r}: {_why_not(model, target)}. Valid names: "
                             f"{', '.join(last_names(layers))}, or {ALL_LINEAR} for all but the output head")
    return [name for name in layers if any(_matches(target, name) for target in targets)]


def shortest_targets(model: "PreTrainedModel", names: list[str]) -> list[str]:
    """The last parts of these layers' names if they match the same layers, else the full names."""
    short = last_names(names)
    return short if chosen_layers(model, short) == names else names


def last_names(names: Iterable[str]) -> list[str]:
    """The distinct last parts of dotted names, sorted."""
    return sorted({name.rpartition(".")[2] for name in names})


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can have an adapter, by name: linear layers, including GPT-2's transposed form."""
    from transformers.pytorch_utils import Conv1D

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}


def stored_transposed(model: nn.Module, names: list[str]) -> bool:
    """Whether these layers store their weights [in, out]."""
    layers = linear_layers(model)
    return not any(isinstance(layers[name], nn.Linear) for name in names)


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_tied(model: "PreTrainedModel") -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def _why_not(model: "PreTrainedModel", target: str) -> str:
    for name, layer in model.named_modules():
        if name == HEAD == target:
            return "the scalar head is always trained in full"
        if layer is model.get_output_embeddings() and _matches(target, name):
            return (f"the weight of {name} is also the token embedding's (tie_word_embeddings), and an adapter "
                    "would change only one of them")
        if _matches(target, name):
            return f"{name} is of type {type(layer).__name__}, and only linear layers can have adapters"
    return f"{type(model).__name__} has no such layer"
