"""From what a configuration says of a model to its shape: config.json alone is read, never a weight."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.planning.known_models import KNOWN, known_shape
from rlhf_ray.planning.model_shape import ModelShape

Fetch = Callable[[ModelConfig], Mapping[str, Any] | None]
"""config.json of a model that is not here; None where it cannot be had."""
UNGATED = frozenset({"gpt2", "gpt_neox", "opt", "phi", "bert", "roberta", "distilbert", "electra"})
"""Architectures (`model_type`) whose feed-forward layer has two matrices; encoders among them may be rewards."""
BYTES = {"float32": 4, "bfloat16": 2}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that tell a mixture of experts."""
NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
}
"""Keys of config.json by architecture; the first that is there counts."""


def shape_of(model: ModelConfig | NewModelConfig, field: str, fetch: Fetch | None = None) -> ModelShape:
    """The shape of a model, in the precision that the configuration loads it in.

    Args:
        field: the section of the configuration, for messages.
        fetch: asks elsewhere for a model that is neither a directory here nor in the table.

    Raises:
        ModelError: nobody knows the model, or its config.json does not say its shape.
    """
    if isinstance(model, NewModelConfig):
        return _new(model)
    file = Path(model.path).expanduser() / "config.json"
    if file.is_file():
        return read_shape(_read(file, field), f"{field}.path={model.path!r}").in_bytes(BYTES[model.dtype])
    found = known_shape(model.path)
    if found is None and fetch is not None and (values := fetch(model)) is not None:
        found = read_shape(values, f"{field}.path={model.path!r}")
    if found is None:
        raise ModelError(
            f"{field}.path={model.path!r}: its shape is not known: no config.json in such a directory (relative paths "
            f"start at {Path.cwd()}), not among the {sum(len(k.names) for k in KNOWN)} names that are known without a "
            "network, and not to be had from the Hub. Correct the path, or say which model has the same shape: "
            f"--shape {model.path}=Qwen/Qwen2.5-0.5B")
    return found.in_bytes(BYTES[model.dtype])


def read_shape(values: Mapping[str, Any], what: str) -> ModelShape:
    """The shape that a config.json tells of.

    Raises:
        ModelError: a number is missing; names it and `what`.
    """
    values = values.get("text_config") or values
    experts = [key for key in EXPERTS if (values.get(key) or 1) > 1]
    if experts:
        raise ModelError(f"{what}: {experts[0]}={values[experts[0]]} in its config.json makes it a mixture of experts, "
                         "whose memory is not planned; name a dense model of about its size with --shape")
    numbers = {name: next((values[key] for key in keys if values.get(key)), None) for name, keys in NAMES.items()}
    missing = [NAMES[name][0] for name, number in numbers.items() if number is None]
    missing += [] if values.get("vocab_size") else ["vocab_size"]
    if missing:
        raise ModelError(f"{what}: its config.json has no {' and no '.join(missing)}, so its memory cannot be planned; "
                         "say which model has the same shape with --shape")
    hidden, heads = int(numbers["hidden"] or 0), int(numbers["heads"] or 0)
    return ModelShape(
        hidden=hidden, layers=int(numbers["layers"] or 0), heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        intermediate=int(values.get("intermediate_size") or values.get("n_inner") or 4 * hidden),
        vocabulary=int(values["vocab_size"]), tied=bool(values.get("tie_word_embeddings", False)),
        head_dim=values.get("head_dim"), gated=values.get("model_type") not in UNGATED,
        saved_bytes=BYTES.get(str(values.get("dtype") or values.get("torch_dtype"))),
    )


def _new(model: NewModelConfig) -> ModelShape:
    """Of a model that is made; the tokenizer's file says how many tokens there are."""
    a = model.architecture
    return ModelShape(
        hidden=a.hidden_size, layers=a.layers, heads=a.heads, kv_heads=a.kv_heads or a.heads,
        intermediate=a.intermediate_size, vocabulary=_tokens(Path(model.tokenizer)), tied=a.tie_embeddings,
        bytes_per_value=BYTES[model.dtype],
    )


def _tokens(tokenizer: Path) -> int:
    file = tokenizer.expanduser() / "tokenizer.json"
    if not file.is_file():
        known = known_shape(str(tokenizer))
        if known is None:
            raise ModelError(f"model.tokenizer={str(tokenizer)!r}: there is no {file}, so the vocabulary of the new "
                             "model is not known; make the tokenizer first, or correct the path")
        return known.vocabulary
    values = _read(file, "model.tokenizer")
    ids = [*values.get("model", {}).get("vocab", {}).values(), *(t["id"] for t in values.get("added_tokens", []))]
    return 1 + max((i for i in ids if isinstance(i, int)), default=-1)


def _read(file: Path, field: str) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{field}: {file} cannot be read: {error}") from error
