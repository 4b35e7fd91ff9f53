"""Internals of transformers."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightTransform

VERSION = "5.19.0"


def attention_implementation(model: PreTrainedModel) -> str:
    """The name that `set_attn_implementation` was given last.

    Source: 5.19.0, configuration_utils.py (`PreTrainedConfig._attn_implementation`).
    Missing: there is a setter, but no getter.
    Otherwise: workers fail before they start, when they compare packed passes with transformers' own.
    """
    name: str = model.config._attn_implementation
    return name


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Whether a family computes with torch's scaled-dot-product attention.

    Source: 5.19.0, modeling_utils.py (`PreTrainedModel._supports_sdpa`).
    Missing: `set_attn_implementation` raises an error for a family that does not, in words only.
    Otherwise: as in `attention_implementation`.
    """
    return bool(model._supports_sdpa)


def supports_attention_interface(model: type[PreTrainedModel]) -> bool:
    """Whether a family calls registered attention implementations, and passes on to them what its model is given.

    Source: 5.19.0, modeling_utils.py (`PreTrainedModel._supports_attention_backend`).
    Missing: transformers documents it for authors of models, without a public query.
    Otherwise: learners of families that are not listed in `model_families` run on padded rows, or fail when they start.
    """
    return bool(model._supports_attention_backend)


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether a layer's activations are computed again in the backward pass (when it is in train mode).

    Source: 5.19.0, modeling_layers.py (`GradientCheckpointingLayer.gradient_checkpointing`).
    Missing: `PreTrainedModel.is_gradient_checkpointing` is about the whole model.
    Otherwise: the comparison of packed passes takes more memory than training, or has dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(layer, GradientCheckpointingLayer) and bool(layer.gradient_checkpointing)


def keep_activations(layer: nn.Module) -> None:
    """Recompute no activations of a layer of a model in which checkpointing was enabled.

    Source: as in `is_checkpointed`.
    Missing: `gradient_checkpointing_enable` enables it in all layers.
    Otherwise: `gradient_checkpointing: 0.5` recomputes all layers.
    """
    layer.gradient_checkpointing = False  # type: ignore[assignment]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a decoder, in order; source, what is missing, and otherwise: as `layers_of`."""
    return layers_of(model.get_decoder())


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of all models within a module, in order.

    Source: 5.19.0, modeling_layers.py (`GradientCheckpointingLayer`, the base of all families' layers).
    Missing: families keep their layers under different names.
    Otherwise: `compile_layers` finds nothing to compile, and ZeRO stage 3 gathers the parameters of each module of a
    layer separately.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def router_output(model: PreTrainedModel) -> tuple[type[nn.Module], int]:
    """The class of a mixture's routers, and which of their outputs is the logits.

    Source: 5.19.0, utils/output_capturing.py (`OutputRecorder`), modeling_utils.py
    (`PreTrainedModel._can_record_outputs`).
    Missing: `output_router_logits` computes the logits of all tokens as well, padded ones among them.
    Otherwise: learners with `router_aux_loss_coef` fail before they start.
    """
    recorder = model.base_model._can_record_outputs["router_logits"]
    return recorder.target_class, recorder.index


def checkpoint_tensors(config: PretrainedConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter of a causal language model as its checkpoints have it, by name: an expert each instead of all in one
    tensor, or under another name. Most parameters are as they are.

    Source: 5.19.0, core_model_loading.py (`revert_weight_conversion`), conversion_mapping.py
    (`extract_weight_conversions_for_model`).
    Missing: `save_pretrained` converts so, but writes files.
    Otherwise: publications of mixtures of experts fail.
    """
    from transformers.core_model_loading import revert_weight_conversion

    architecture = (config.architectures or [""])[0]
    conversions = _conversions(architecture, config.model_type)
    if not conversions:
        return {name: tensor}
    model = SimpleNamespace(_weight_conversions=conversions, config=config)
    reverted: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})  # type: ignore[arg-type]
    return reverted


@cache
def _conversions(architecture: str, kind: str) -> list[WeightTransform]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    known = get_checkpoint_conversion_mapping(architecture) or get_checkpoint_conversion_mapping(kind) or []
    return [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
