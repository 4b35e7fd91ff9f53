"""Model families (`model_type` of a config.json): which uses are supported, which are rejected, and why.

Each use of each family below was tested with a tiny random model: passes over rows together against transformers'
forward pass of each row alone, vLLM against the same before and after a publication. A use that is known not to work is
rejected from the model's configuration alone. A family or use that is not listed runs only if its passes agree with
transformers' own in the comparison that every learner and scorer makes at its start (`parity`).

Rows are packed where a family's attention calls ours with all that it needs, and padded where not (`why_padded`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from rlhf_ray.config.adapter_publication import publishes_adapters
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.internals.transformers import supports_attention_interface
from rlhf_ray.models.config_json import is_classifier, local_configuration, pretrained_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Use(Enum):
    """What a model is used for; the value is its description in error messages."""

    LANGUAGE = "log-probabilities of tokens (policy, reference, SFT, process reward model)"
    """Passes of a language model."""
    SCALAR = "a scalar head (critic, reward model under training)"
    """Passes of a sequence classifier with one label."""
    GENERATION = "generation with vLLM"
    PUBLICATION = "new weights for vLLM while it runs (PPO)"


PACKED = frozenset({Use.LANGUAGE, Use.SCALAR})
DECODING = frozenset({Use.GENERATION, Use.PUBLICATION})
EVERYTHING = PACKED | DECODING
POLICY = frozenset({Use.LANGUAGE, *DECODING})
"""The uses that PPO makes of the trained model."""


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`."""

    supported: frozenset[Use] = EVERYTHING
    """Uses that were tested against transformers."""
    refused: Mapping[Use, str] = field(default_factory=dict)
    """Uses that are rejected, and why. Uses in neither were not tested."""
    padded: str | None = None
    """Why its rows are padded, as transformers computes them; None for packed rows."""


_OWN = "its attention bypasses transformers' attention interface"
_RECURRENT = "its layers carry a state from token to token"
_NO_BOUNDARIES = "it does not pass row boundaries on to its attention"
_MASK_ONLY = "its sliding window is only in transformers' attention mask"
_WEIGHTS = "transformers changes its weights when it switches between training and evaluation"
_ENCODER = "it reads a text in both directions"
_CHUNKS = "its attention is cut into chunks (attention_chunk_size)"

FAMILIES: dict[str, Family] = {
    **{name: Family() for name in (
        "cohere", "cohere2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox",
        "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2")},
    "olmo3": Family(PACKED),
    **{name: Family(padded=_OWN) for name in ("bloom", "falcon")},
    "mpt": Family(PACKED, padded=_OWN),
    **{name: Family(padded=_NO_BOUNDARIES) for name in ("nemotron", "stablelm")},
    "moshi": Family(frozenset(), padded=_NO_BOUNDARIES),
    **{name: Family(PACKED, padded=_RECURRENT) for name in (
        "bamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_next",
        "recurrent_gemma")},
    **{name: Family(frozenset(), padded=_RECURRENT)
       for name in ("falcon_h1", "falcon_mamba", "qwen3_5_moe_text", "qwen3_5_text", "xlstm")},
    "rwkv": Family(frozenset(), dict.fromkeys(PACKED, _WEIGHTS)),
}
WINDOW_IN_MASK = frozenset({"doge", "phimoe", "qwen2_moe"})
"""Families that do not pass their sliding window to attention."""
WITHOUT_ADAPTERS = frozenset({"jamba", "mamba", "mamba2", "nemotron_h"})
"""Families whose mixers read their layers' weights without calling the layers, and so would leave out adapters."""


def check_family(
    model: ModelConfig | NewModelConfig, section: str, uses: Collection[Use], longest: tuple[int, str] | None = None
) -> None:
    """Reject a model that is known not to work in one of these uses, from its configuration alone.

    Args:
        section: the section of the configuration that names the model, or the argument of a command.
        longest: tokens of the longest row of passes, and the field that sets it.

    Raises:
        ModelError: names the field, the family, the reason and what to do.
    """
    if isinstance(model, NewModelConfig):
        return  # new models are of families that can be used for everything
    values = _configuration(model)
    kind, refused = str(values.get("model_type")), _refused(values)
    if Use.SCALAR not in uses and is_classifier(values.get("architectures")):
        raise ModelError(f"{section}: {model.path!r} is a classifier ({', '.join(values['architectures'])}), as "
                         "reward models are, and has no output head for tokens; use a language model")
    for use in (use for use in Use if use in uses and use in refused):
        raise ModelError(
            f"{section}: {model.path!r} is of the family {kind!r}, which cannot be used for {use.value}: "
            f"{refused[use]}. Use a model of a family that can: {', '.join(_supporting(uses))} (see docs/models.md)")
    if longest is not None and PACKED & set(uses):
        tokens, field = longest
        for limit, what, why in _limits(values):
            if tokens > limit:
                raise ModelError(f"{field}={tokens} tokens is over the {what} of {model.path!r}, {limit}: {why}; lower "
                                 "it to that, or use a model without one")


def model_family(model: ModelConfig) -> str:
    """`model_type` of a model's configuration.

    Raises:
        ModelError: the configuration cannot be read.
    """
    return str(_configuration(model).get("model_type"))


def sends_adapters(config: PPOConfig) -> bool:
    """As `publishes_adapters`, of the family that the policy's files name; without adapters they are not read."""
    return config.policy.lora is not None and publishes_adapters(config, model_family(config.model))


def refusals(model: ModelConfig) -> dict[Use, str]:
    """The uses for which `check_family` rejects a model, and why.

    Raises:
        ModelError: the configuration cannot be read.
    """
    return _refused(_configuration(model))


def why_padded(shape: PretrainedConfig) -> str | None:
    """Why a decoder of this configuration runs on padded rows with transformers' own attention; None if it runs on
    packed rows."""
    values, family = _values(shape), FAMILIES.get(shape.model_type)
    if values.get("use_bidirectional_attention") or (family is None and _by_transformers(shape.model_type)):
        return _ENCODER
    if _has_layers(values, "attention_chunk_size", "chunked_attention"):
        return _CHUNKS
    if shape.model_type in WINDOW_IN_MASK and _has_layers(values, "sliding_window", "sliding_attention"):
        return _MASK_ONLY
    if family is None and not _calls_attention_interface(shape):
        return _OWN
    return family.padded if family else None


def _has_layers(values: Mapping[str, Any], size: str, kind: str) -> bool:
    """Whether this size is set, and a layer is of the kind that it is for."""
    return bool(values.get(size)) and kind in (values.get("layer_types") or [kind])


def _calls_attention_interface(shape: PretrainedConfig) -> bool:
    """Whether transformers has this family's decoder, with support of registered attention implementations."""
    from transformers import MODEL_MAPPING

    return type(shape) in MODEL_MAPPING and is_decoder(shape) and supports_attention_interface(
        MODEL_MAPPING[type(shape)])


def is_decoder(shape: PretrainedConfig) -> bool:
    """Whether this is a decoder that transformers has."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    return type(shape) in MODEL_FOR_CAUSAL_LM_MAPPING and type(shape) not in MODEL_FOR_MASKED_LM_MAPPING


def _supporting(uses: Collection[Use]) -> list[str]:
    return sorted(name for name, family in FAMILIES.items() if family.supported.issuperset(uses))


def _configuration(model: ModelConfig) -> dict[str, Any]:
    """A model's configuration, including transformers' defaults where they matter here.

    A local file of a known family that sets nothing unusual is read directly: importing transformers' class for it
    would take two seconds.

    Raises:
        ModelError: the configuration cannot be read.
    """
    try:
        values = local_configuration(model)
    except ValueError as error:
        raise ModelError(f"no model could be loaded from {model.path!r}: config.json: {error}") from error
    special = values.get("use_bidirectional_attention") or any(
        rope.get("rope_type", rope.get("type", "default")) != "default" for rope in _ropes(values))
    if values.get("model_type") in FAMILIES and not special:
        return values
    return _values(pretrained_config(model))


def _values(shape: PretrainedConfig) -> dict[str, Any]:
    """The text configuration, which for multimodal models is a part (`text_config`), with the whole model's
    `model_type`."""
    text = shape.get_text_config()
    part = {} if text is shape else {"text_config": True}
    return {**text.to_dict(), "model_type": shape.model_type, **part}


def _ropes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rotary-embedding parameters; some models have one set for local attention and another for global."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    parts = [part for part in given.values() if isinstance(part, dict)]
    return parts or [given]


def _refused(values: Mapping[str, Any]) -> dict[Use, str]:
    """The reasons for which a model of this configuration is rejected, by use."""
    kind = str(values.get("model_type"))
    family = FAMILIES.get(kind)
    reasons = dict(family.refused) if family else _by_transformers(kind)
    if values.get("use_bidirectional_attention"):
        reasons |= dict.fromkeys(PACKED, "its tokens attend to later ones (use_bidirectional_attention)")
    if reason := _why_vllm_differs(values):
        reasons |= dict.fromkeys(DECODING, reason)
    return reasons


def _why_vllm_differs(values: Mapping[str, Any]) -> str | None:
    """Why vLLM 0.32 and transformers compute different models from this configuration; None if they agree."""
    kind = str(values.get("model_type"))
    if kind == "falcon" and values.get("alibi"):
        return "transformers rounds its ALiBi biases to bfloat16 (alibi=true), and vLLM does not"
    if kind in ("gpt_oss", "deepseek_v3") and values.get("tie_word_embeddings"):
        return "vLLM gives it a head of its own, without weights (tie_word_embeddings=true)"
    if kind in ("bloom", "cohere", "cohere2", "gemma2") and values.get("tie_word_embeddings") is False:
        return "vLLM takes its embedding for its head, or fails (tie_word_embeddings=false)"
    if kind == "cohere2" and "sliding_attention" in (values.get("layer_types") or ["sliding_attention"]):
        return f"vLLM's sliding window is one token wider than transformers' ({values.get('sliding_window', 4096)})"
    if values.get("text_config"):
        return ("it is a language model within a multimodal one (text_config in its config.json), and generators hold "
                "language models alone: export the text model with transformers, and name that")
    missing = [f"{name}={value!r}" for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))
               if kind == "deepseek_v3" and values.get(name) != value]
    if missing:
        return f"vLLM routes as transformers does only with {' and '.join(missing)} in its config.json"
    return None


def _by_transformers(kind: str) -> dict[Use, str]:
    """The reasons that transformers' own lists give for a family that is not listed here."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_MASKED_LM_MAPPING:
        return {}
    return dict.fromkeys(EVERYTHING, _ENCODER)


def _limits(values: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """(tokens, what limits them, why) of the longest row for which passes compute what the model does."""
    for rope in _ropes(values):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
            yield int(limit), f"context before {rope['rope_type']} rope scaling", (
                "beyond it the longest row of a pass changes the rotary embeddings of all its rows")
