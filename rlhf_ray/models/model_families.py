"""Model families (`model_type` of a config.json): which uses are supported, which are rejected, and why.

Each use of each family below was tested with a tiny random model in float32: packed passes against transformers'
forward pass of each row alone, vLLM against the same before and after a publication. A use that is known not to work is
rejected from the model's configuration alone. A family or use that is not listed runs only if packed passes agree with
padded ones in the comparison that every learner and scorer makes at its start (`parity`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.loading import local_configuration, pretrained_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Use(Enum):
    """What a model is used for; the value is its description in error messages."""

    LANGUAGE = "log-probabilities of tokens (policy, reference, SFT, process reward model)"
    """Packed passes of a language model."""
    SCALAR = "a scalar head (critic, reward model under training)"
    """Packed passes of a sequence classifier with one label."""
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
    plain: bool = True
    """Whether transformers' defaults for entries missing in its config.json set nothing of `_SPECIAL`."""


_NO_HEAD = "transformers has no sequence classifier for it"
_OWN = "its attention bypasses transformers' attention interface, so packed rows would attend to each other"
_RECURRENT = "its layers carry a state from token to token, and would carry it from one packed row to the next"
_NO_BOUNDARIES = "it does not pass row boundaries on to its attention"
_SINKS = "its attention has sinks (s_aux), which packed attention does not compute"

FAMILIES: dict[str, Family] = {
    **{name: Family() for name in (
        "gemma", "glm", "glm4", "gpt2", "gpt_neox", "llama", "mixtral", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2")},
    **{name: Family(plain=False) for name in ("gemma3_text", "mistral")},
    "deepseek_v3": Family(DECODING),
    "gemma2": Family(DECODING, plain=False),
    "granite": Family(EVERYTHING - {Use.SCALAR}, {Use.SCALAR: _NO_HEAD}),
    **{name: Family(DECODING, {Use.SCALAR: _NO_HEAD}, plain=False) for name in ("cohere", "cohere2")},
    "falcon": Family(DECODING, dict.fromkeys(PACKED, _OWN)),
    "bloom": Family(DECODING, dict.fromkeys(PACKED, _OWN)),
    "mpt": Family(frozenset(), dict.fromkeys(PACKED, _OWN)),
    "gpt_oss": Family(DECODING, dict.fromkeys(PACKED, _SINKS)),
    **{name: Family(frozenset(), dict.fromkeys(PACKED, _SINKS))
       for name in ("granite_swa", "granitemoe_swa", "mimo_v2_flash")},
    **{name: Family(DECODING, dict.fromkeys(PACKED, _NO_BOUNDARIES)) for name in ("nemotron", "stablelm")},
    "moshi": Family(frozenset(), dict.fromkeys(PACKED, _NO_BOUNDARIES)),
    **{name: Family(frozenset(), dict.fromkeys(PACKED, _RECURRENT)) for name in (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "minimax", "nemotron_h",
        "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm")},
}


def check_family(
    model: ModelConfig | NewModelConfig, section: str, uses: Collection[Use], longest: tuple[int, str] | None = None
) -> None:
    """Reject a model that is known not to work in one of these uses, from its configuration alone.

    Args:
        section: the section of the configuration that names the model, or the argument of a command.
        longest: tokens of the longest row of packed passes, and the field that sets it.

    Raises:
        ModelError: names the field, the family, the reason and what to do.
    """
    if isinstance(model, NewModelConfig):
        return  # new models are Llamas
    values = _configuration(model)
    kind, refused = str(values.get("model_type")), _refused(values)
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


def runs_packed(shape: PretrainedConfig) -> bool:
    """Whether scalar models of this configuration were tested to give transformers' results on packed rows as long as
    their context."""
    values, known = _values(shape), FAMILIES.get(shape.model_type)
    return (known is not None and Use.SCALAR in known.supported and Use.SCALAR not in _refused(values)
            and all(limit >= shape.max_position_embeddings for limit, *_ in _limits(values)))


def refusals(model: ModelConfig) -> dict[Use, str]:
    """The uses for which `check_family` rejects a model, and why.

    Raises:
        ModelError: the configuration cannot be read.
    """
    return _refused(_configuration(model))


def _supporting(uses: Collection[Use]) -> list[str]:
    return sorted(name for name, family in FAMILIES.items() if family.supported.issuperset(uses))


def _configuration(model: ModelConfig) -> dict[str, Any]:
    """A model's configuration, including transformers' defaults where they matter here.

    A local file of a plain family that sets none of `_SPECIAL` is read directly: importing transformers' class for it
    would take two seconds.

    Raises:
        ModelError: the configuration cannot be read.
    """
    try:
        values = local_configuration(model)
    except ValueError as error:
        raise ModelError(f"no model could be loaded from {model.path!r}: config.json: {error}") from error
    family = FAMILIES.get(str(values.get("model_type")))
    special = any(values.get(name) for name in _SPECIAL) or any(
        rope.get("rope_type", rope.get("type", "default")) != "default" for rope in _ropes(values))
    if family is not None and family.plain and not special:
        return values
    return _values(pretrained_config(model))


_SPECIAL = ("attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
            "logits_scaling", "sliding_window", "use_bidirectional_attention")


def _values(shape: PretrainedConfig) -> dict[str, Any]:
    """The text configuration, which for multimodal models is a part, with the whole model's `model_type`."""
    return {**shape.get_text_config().to_dict(), "model_type": shape.model_type}


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
    if values.get("attn_logit_softcapping"):
        reasons |= dict.fromkeys(PACKED, "attn_logit_softcapping caps its attention, which packed attention does not")
    if values.get("use_bidirectional_attention"):
        reasons |= dict.fromkeys(PACKED, "its tokens attend to later ones (use_bidirectional_attention)")
    if reason := _not_as_vllm_has_it(values):
        reasons |= dict.fromkeys(DECODING, reason)
    for name, does in (("final_logit_softcapping", "caps"), ("logit_scale", "scales"), ("logits_scaling", "scales")):
        if values.get(name) not in (None, 1):
            reasons[Use.LANGUAGE] = f"{name}={values[name]} {does} its logits, which packed passes do not"
    return reasons


def _not_as_vllm_has_it(values: Mapping[str, Any]) -> str | None:
    """Why vLLM 0.32 computes another model of this configuration than transformers does; None if it does not."""
    kind = str(values.get("model_type"))
    if kind == "falcon" and values.get("alibi"):
        return "transformers rounds its ALiBi biases to bfloat16 (alibi=true), and vLLM does not"
    if kind in ("gpt_oss", "deepseek_v3") and values.get("tie_word_embeddings"):
        return "vLLM gives it a head of its own, without weights (tie_word_embeddings=true)"
    if kind in ("cohere", "cohere2", "gemma2") and values.get("tie_word_embeddings") is False:
        return "vLLM takes the embedding for its head, whatever tie_word_embeddings is"
    missing = [f"{name}={value!r}" for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"))
               if kind == "deepseek_v3" and values.get(name) != value]
    if missing:
        return f"vLLM routes as transformers does only with {' and '.join(missing)} in its config.json"
    return None


def _by_transformers(kind: str) -> dict[Use, str]:
    """The reasons that transformers' own lists give for a family that is not listed here."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if kind not in CONFIG_MAPPING:
        return {}
    if CONFIG_MAPPING[kind] in MODEL_FOR_MASKED_LM_MAPPING:
        return dict.fromkeys(EVERYTHING, "it reads a text in both directions")
    return {} if CONFIG_MAPPING[kind] in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING else {Use.SCALAR: _NO_HEAD}


def _limits(values: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """(tokens, what limits them, why) of the longest row for which packed passes compute what the model does."""
    layers = values.get("layer_types") or ["sliding_attention", "chunked_attention"]
    whole = "packed attention covers whole rows, and would train another model than vLLM runs"
    for name, kind, what in (("sliding_window", "sliding_attention", "sliding window"),
                             ("attention_chunk_size", "chunked_attention", "attention_chunk_size")):
        if values.get(name) and kind in layers:
            yield int(values[name]), what, whole
    for rope in _ropes(values):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
            yield int(limit), f"context before {rope['rope_type']} rope scaling", (
                "beyond it the longest row of a pass changes the rotary embeddings of all its rows")
