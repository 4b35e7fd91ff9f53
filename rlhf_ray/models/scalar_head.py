"""Sequence classifiers of every family: transformers' own class, or one that is put together as transformers does."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def classifier_class(shape: PretrainedConfig) -> Any:
    """The class to load a sequence classifier of this configuration with.

    Where transformers has none for a decoder, it is the family's backbone with a linear layer `score` and without bias:
    `GenericForSequenceClassification`, from which transformers makes its own for most families. Files have the same
    layout and the same name in `architectures` as if transformers had it.
    """
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        AutoModelForSequenceClassification,
    )

    if type(shape) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or type(shape) not in MODEL_MAPPING:
        return AutoModelForSequenceClassification
    return _generic_class(MODEL_MAPPING[type(shape)])


def new_classifier(shape: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """A sequence classifier of this configuration with random weights."""
    chosen = classifier_class(shape)
    model: PreTrainedModel = (chosen.from_config(shape, trust_remote_code=trust_remote_code)
                              if hasattr(chosen, "from_config") else chosen(shape))
    return model


@cache
def _generic_class(backbone: type[PreTrainedModel]) -> type[PreTrainedModel]:
    from transformers.modeling_layers import GenericForSequenceClassification

    # The head comes before the family in the order of bases, but the family's name of its backbone stays.
    return type(
        backbone.__name__.removesuffix("Model") + "ForSequenceClassification",
        (GenericForSequenceClassification, _family_base(backbone)),
        {"base_model_prefix": backbone.base_model_prefix, "__module__": __name__})


def _family_base(backbone: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of a family from which its backbone and its heads derive."""
    from transformers import PreTrainedModel

    return next(base for base in backbone.__mro__ if PreTrainedModel in base.__bases__)
