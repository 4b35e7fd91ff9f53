"""config.json of models, without their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def local_configuration(config: ModelConfig) -> dict[str, Any]:
    """config.json of a local model, without transformers' defaults; {} for a model on the Hub.

    Raises:
        ValueError: the file is not valid JSON.
    """
    file = Path(config.path) / "config.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def pretrained_config(config: ModelConfig) -> PretrainedConfig:
    """A model's Hugging Face configuration.

    Raises:
        ModelError: the configuration is missing or damaged, or needs remote code that is not trusted.
    """
    from transformers.models.auto.configuration_auto import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.path, **config.trust)
    except Exception as error:  # an unknown type, a field of another type, no JSON: each raises its own error
        raise ModelError(f"no model could be loaded from {config.path!r}: {first_line(error)}") from error


def is_classifier(architectures: Sequence[str] | None) -> bool:
    """Whether a model with these `architectures` is a sequence classifier, as reward models are."""
    return any("SequenceClassification" in name for name in architectures or [])


def context_of(config: PretrainedConfig) -> int | None:
    """Positions of a model in tokens; None if it has no limit."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    return longest if longest and longest > 0 else None
