"""Which layers of a model get adapters: names checked against the model, and words when they do not fit."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.loading import pretrained_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
HEAD = "score"
"""Name of a scalar model's head. It is new or as good as new, so it is trained whole beside the adapters."""


def check_targets(targets: list[str], model: ModelConfig, field: str, scalar: bool) -> None:
    """Refuse names of layers that a model has not, by its configuration alone; `all-linear` fits every model.

    Args:
        field: the configuration field that holds the targets.
        scalar: the model is trained with a scalar head in place of its output head.

    Raises:
        ModelError: naming the field, the value and the layers that exist.
    """
    if targets == [ALL_LINEAR]:
        return
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    shape = pretrained_config(model)
    with torch.device("meta"):
        skeleton = auto.from_config(shape, trust_remote_code=model.trust_remote_code)
    chosen_layers(skeleton, targets, field)


def chosen_layers(model: "PreTrainedModel", targets: list[str], field: str = "lora.targets") -> list[str]:
    """Full names of the layers that `targets` speak of, in the model's order.

    A target is the end of a layer's name, cut at a dot: `q_proj` is that layer of every block,
    `layers.0.self_attn.q_proj` the one of the first.

    Raises:
        ModelError: a target is no linear layer of the model, or its scalar head, or a head tied to the embedding.
    """
    output = model.get_output_embeddings()
    layers = {name: layer for name, layer in linear_layers(model).items() if name != HEAD}
    if targets == [ALL_LINEAR]:
        return [name for name, layer in layers.items() if layer is not output]
    if _is_tied(model):
        layers = {name: layer for name, layer in layers.items() if layer is not output}
    for target in targets:
        if not any(_speaks_of(target, name) for name in layers):
            raise ModelError(f"{field} names {target!r}: {_what_it_is(model, target)}. What can be named: "
                             f"{', '.join(last_names(layers))}, or {ALL_LINEAR} for all but the output head")
    return [name for name in layers if any(_speaks_of(target, name) for target in targets)]


def shortest_targets(model: "PreTrainedModel", names: list[str]) -> list[str]:
    """The last parts of these layers' names if they mean the same layers, else the names themselves."""
    short = last_names(names)
    return short if chosen_layers(model, short) == names else names


def last_names(names: Iterable[str]) -> list[str]:
    """Each last part of dotted names once, sorted."""
    return sorted({name.rpartition(".")[2] for name in names})


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that an adapter can stand beside, by name: linear ones, also in GPT-2's transposed form."""
    from transformers.pytorch_utils import Conv1D

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}


def stored_transposed(model: nn.Module, names: list[str]) -> bool:
    """Whether these layers store their weights [in, out]."""
    layers = linear_layers(model)
    return not any(isinstance(layers[name], nn.Linear) for name in names)


def _speaks_of(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _is_tied(model: "PreTrainedModel") -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def _what_it_is(model: "PreTrainedModel", target: str) -> str:
    for name, layer in model.named_modules():
        if name == HEAD == target:
            return "the scalar head is trained whole anyway"
        if layer is model.get_output_embeddings() and _speaks_of(target, name):
            return (f"the weight of {name} is the token embedding's too (tie_word_embeddings), and an adapter would "
                    "change one of them without the other")
        if _speaks_of(target, name):
            return f"{name} is of type {type(layer).__name__}, and adapters stand beside linear layers"
    return f"{type(model).__name__} has no such layer"
