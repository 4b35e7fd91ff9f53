"""The tokens that end a response, as a model's files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.models.hub import file_from_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELD = "eos_token_id"
FILES = ("config.json", "generation_config.json")
"""Files that name end tokens; chat models list the end of a turn in the second one."""


def named_stop_tokens(
    tokenizer: PreTrainedTokenizerBase, model: ModelConfig | NewModelConfig | None = None
) -> list[int]:
    """The tokenizer's end-of-sequence token, if it has one, and those of the model's config.json and
    generation_config.json.

    Args:
        model: for None, and for a new model, the files beside the tokenizer count, if it lies in a directory.

    Raises:
        ModelError: a file is damaged, or names something other than tokens of the model.
    """
    tokens = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if not isinstance(model, ModelConfig):
        beside = tokenizer.name_or_path
        if not beside or not Path(beside).is_dir():
            return sorted(tokens)
        model = ModelConfig(path=beside)
    vocabulary: int | None = None
    for file in FILES:
        values = _values(model, file)
        inner = values.get("text_config")
        for settings in (values, inner if isinstance(inner, dict) else {}):
            vocabulary = vocabulary or settings.get("vocab_size")
            tokens.update(_tokens(settings.get(FIELD), f"{Path(model.path) / file}", vocabulary))
    return sorted(tokens)


def _values(model: ModelConfig, file: str) -> dict[str, Any]:
    """The entries of one of the model's files; {} if it has none.

    Raises:
        ModelError: it is not a JSON object.
    """
    directory = Path(model.path)
    if not directory.is_dir():
        return file_from_hub(model, file) or {}
    try:
        values = json.loads((directory / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory / file} cannot be read as JSON: {error}. Restore it") from error
    if not isinstance(values, dict):
        raise ModelError(f"{directory / file} holds {type(values).__name__} instead of a JSON object; restore it")
    return values


def _tokens(value: Any, file: str, vocabulary: int | None) -> list[int]:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    for token in tokens:
        known = type(token) is int and token >= 0 and (not isinstance(vocabulary, int) or token < vocabulary)
        if not known:
            last = f" to {vocabulary - 1}" if isinstance(vocabulary, int) else " or more"
            raise ModelError(f"{file} has {FIELD}={value!r}, and {token!r} is not a token of the model, which is a "
                             f"number of 0{last}; correct it")
    return tokens
