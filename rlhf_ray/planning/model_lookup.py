"""Finds the shape of a model that a configuration names: from its config.json, a table of public models, or the Hub.

Weights are never read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.planning.model_shape import ModelShape

Fetch = Callable[[ModelConfig], Mapping[str, Any]]
"""Fetches the config.json of a model that is no local directory; raises ModelError, whose message is the end of a
sentence, if it cannot."""
UNGATED = frozenset({"gpt2", "gpt_neox", "opt", "phi", "bert", "roberta", "distilbert", "electra"})
"""Architectures (`model_type`) whose feed-forward layer has two matrices; encoders among them may be rewards."""
BYTES = {"float32": 4, "bfloat16": 2}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that identify a mixture of experts."""
MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Mixtures of experts (`model_type`) whose weights are counted; others place their experts by keys of their own."""
NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
}
"""Keys of config.json, which differ by architecture; the first one present counts."""


def shape_of(model: ModelConfig | NewModelConfig, field: str, fetch: Fetch | None = None) -> ModelShape:
    """The shape of a model, in the precision that the configuration loads it in.

    Args:
        field: the section of the configuration, for messages.
        fetch: fetches config.json of a model that is neither a local directory nor in the table.

    Raises:
        ModelError: the model is unknown, or its config.json lacks part of the shape.
    """
    if isinstance(model, NewModelConfig):
        return _new(model)
    file = Path(model.path) / "config.json"
    if file.is_file():
        return read_shape(_read(file, field), f"{field}.path={model.path!r}").in_bytes(BYTES[model.dtype])
    shape = known_shape(model.path)
    if shape is None:
        shape = read_shape(_fetched(model, field, fetch), f"{field}.path={model.path!r}")
    return shape.in_bytes(BYTES[model.dtype])


def _fetched(model: ModelConfig, field: str, fetch: Fetch | None) -> Mapping[str, Any]:
    """config.json of a model that is neither a local directory nor in the table.

    Raises:
        ModelError: it could not be fetched.
    """
    reason = "the Hub was not asked. Correct the path"
    if fetch is not None:
        try:
            return fetch(model)
        except ModelError as error:
            reason = str(error)
    raise ModelError(
        f"{field}.path={model.path!r}: the shape of this model is not known. There is no such directory with a "
        f"config.json (relative paths start at {Path.cwd()}), it is not among the "
        f"{sum(len(k.names) for k in KNOWN)} names that are known without a network, and {reason}. "
        f"`rlhf-ray plan` also takes a model of the same shape: --shape {model.path}=Qwen/Qwen2.5-0.5B")


def read_shape(values: Mapping[str, Any], what: str) -> ModelShape:
    """The shape that a config.json describes.

    Raises:
        ModelError: a number is missing, or the model is a mixture of experts whose weights are not counted.
    """
    family = values.get("model_type")
    values = values.get("text_config") or values
    experts = [key for key in EXPERTS if (values.get(key) or 1) > 1]
    if experts and values.get("model_type") not in MIXTURES:
        raise ModelError(f"{what}: {experts[0]}={values[experts[0]]} in its config.json makes it a mixture of experts, "
                         f"and only those of {', '.join(MIXTURES)} can be planned; name a model of about the same size "
                         "with --shape")
    numbers = {name: next((values[key] for key in keys if values.get(key)), None) for name, keys in NAMES.items()}
    missing = [NAMES[name][0] for name, number in numbers.items() if number is None]
    missing += [key for key in ("vocab_size", *(["num_experts_per_tok"] if experts else [])) if not values.get(key)]
    if missing:
        raise ModelError(f"{what}: its config.json has no {' and no '.join(missing)}, so its memory cannot be planned; "
                         "name a model of the same shape with --shape")
    hidden, heads, layers = int(numbers["hidden"] or 0), int(numbers["heads"] or 0), int(numbers["layers"] or 0)
    shape = ModelShape(
        hidden=hidden, layers=layers, heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        intermediate=int(values.get("intermediate_size") or values.get("n_inner") or 4 * hidden),
        vocabulary=int(values["vocab_size"]), tied=bool(values.get("tie_word_embeddings", False)),
        head_dim=values.get("head_dim"), gated=values.get("model_type") not in UNGATED,
        context=values.get("max_position_embeddings"), family=family,
        saved_bytes=BYTES.get(str(values.get("dtype") or values.get("torch_dtype"))),
    )
    if experts:
        shape = replace(shape, **_mixture(values, values[experts[0]], layers))
    return replace(shape, **_latent(values, hidden, heads)) if values.get("kv_lora_rank") else shape


def _mixture(values: Mapping[str, Any], experts: int, layers: int) -> dict[str, Any]:
    """The fields of a mixture of experts, from the keys of `MIXTURES`."""
    width = int(values.get("moe_intermediate_size") or values["intermediate_size"])
    dense, every = values.get("mlp_only_layers") or (), int(values.get("decoder_sparse_step") or 1)
    return {
        "experts": int(experts), "active_experts": int(values["num_experts_per_tok"]), "expert_intermediate": width,
        "shared_intermediate": int(values.get("shared_expert_intermediate_size")
                                   or (values.get("n_shared_experts") or 0) * width),
        "dense_layers": int(values.get("first_k_dense_replace") or 0)
        + sum(layer in dense or (layer + 1) % every != 0 for layer in range(layers)),
    }


def _latent(values: Mapping[str, Any], hidden: int, heads: int) -> dict[str, Any]:
    """The fields of latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""
    latent, turned, plain, value = (
        int(values[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    queries, compressed = heads * (plain + turned), values.get("q_lora_rank")
    projected = compressed * (hidden + queries) if compressed else hidden * queries
    return {"attention": projected + hidden * (latent + turned) + latent * heads * (plain + value)
            + heads * value * hidden, "cached": latent + turned, "head_dim": plain + turned}


def _new(model: NewModelConfig) -> ModelShape:
    """The shape of a new model; the tokenizer's file gives the size of the vocabulary."""
    entries = {**model.architecture.config_entries(), "vocab_size": _tokens(Path(model.tokenizer))}
    return read_shape(entries, "model.architecture").in_bytes(BYTES[model.dtype])


def _tokens(tokenizer: Path) -> int:
    file = tokenizer / "tokenizer.json"
    if not file.is_file():
        known = known_shape(str(tokenizer))
        if known is None:
            raise ModelError(f"model.tokenizer={str(tokenizer)!r}: there is no {file}, so the vocabulary size of "
                             "the new model is not known; create the tokenizer first, or correct the path")
        return known.vocabulary
    values = _read(file, "model.tokenizer")
    ids = [*values.get("model", {}).get("vocab", {}).values(), *(t["id"] for t in values.get("added_tokens", []))]
    return 1 + max((i for i in ids if isinstance(i, int)), default=-1)


def _read(file: Path, field: str) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{field}: {file} cannot be read: {error}") from error


@dataclass(frozen=True)
class KnownModel:
    """A model shape, and the names under which it is published."""

    names: tuple[str, ...]
    """Names on the Hub; tuned variants share the shape of their base model."""
    billions: float
    """Weights in billions, from the model card."""
    shape: ModelShape


def _named(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}/{name}" for name in names)


def _shape(hidden: int, layers: int, heads: tuple[int, int], intermediate: int, vocabulary: int, tied: bool = False,
           head_dim: int | None = None) -> ModelShape:
    return ModelShape(hidden=hidden, layers=layers, heads=heads[0], kv_heads=heads[1], intermediate=intermediate,
                      vocabulary=vocabulary, tied=tied, head_dim=head_dim)


KNOWN = (
    # Qwen2.5 (Qwen team 2024, arXiv:2412.15115, table 1)
    KnownModel(_named("Qwen", "Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct"), 0.49,
               _shape(896, 24, (14, 2), 4864, 151936, tied=True)),
    KnownModel(_named("Qwen", "Qwen2.5-1.5B", "Qwen2.5-1.5B-Instruct", "Qwen2.5-Math-1.5B"), 1.54,
               _shape(1536, 28, (12, 2), 8960, 151936, tied=True)),
    KnownModel(_named("Qwen", "Qwen2.5-3B", "Qwen2.5-3B-Instruct"), 3.09,
               _shape(2048, 36, (16, 2), 11008, 151936, tied=True)),
    KnownModel(_named("Qwen", "Qwen2.5-7B", "Qwen2.5-7B-Instruct"), 7.61,
               _shape(3584, 28, (28, 4), 18944, 152064)),
    KnownModel(_named("Qwen", "Qwen2.5-14B", "Qwen2.5-14B-Instruct"), 14.7,
               _shape(5120, 48, (40, 8), 13824, 152064)),
    KnownModel(_named("Qwen", "Qwen2.5-32B", "Qwen2.5-32B-Instruct"), 32.5,
               _shape(5120, 64, (40, 8), 27648, 152064)),
    KnownModel(_named("Qwen", "Qwen2.5-72B", "Qwen2.5-72B-Instruct"), 72.7,
               _shape(8192, 80, (64, 8), 29568, 152064)),
    # Qwen3 (Qwen team 2025, arXiv:2505.09388, table 1)
    KnownModel(_named("Qwen", "Qwen3-0.6B", "Qwen3-0.6B-Base"), 0.6,
               _shape(1024, 28, (16, 8), 3072, 151936, tied=True, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-1.7B", "Qwen3-1.7B-Base"), 1.7,
               _shape(2048, 28, (16, 8), 6144, 151936, tied=True, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-4B", "Qwen3-4B-Base"), 4.0,
               _shape(2560, 36, (32, 8), 9728, 151936, tied=True, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-8B", "Qwen3-8B-Base"), 8.2,
               _shape(4096, 36, (32, 8), 12288, 151936, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-14B", "Qwen3-14B-Base"), 14.8,
               _shape(5120, 40, (40, 8), 17408, 151936, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-32B"), 32.8,
               _shape(5120, 64, (64, 8), 25600, 151936, head_dim=128)),
    # Llama 3 (Dubey et al. 2024, arXiv:2407.21783, table 3) and 3.2
    KnownModel(_named("meta-llama", "Llama-3.2-1B", "Llama-3.2-1B-Instruct"), 1.23,
               _shape(2048, 16, (32, 8), 8192, 128256, tied=True)),
    KnownModel(_named("meta-llama", "Llama-3.2-3B", "Llama-3.2-3B-Instruct"), 3.21,
               _shape(3072, 28, (24, 8), 8192, 128256, tied=True)),
    KnownModel((*_named("meta-llama", "Llama-3.1-8B", "Llama-3.1-8B-Instruct", "Meta-Llama-3-8B"),
                "allenai/Llama-3.1-Tulu-3-8B-SFT", "allenai/Llama-3.1-Tulu-3-8B-DPO",
                "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2", "Skywork/Skywork-Reward-V2-Llama-3.1-8B"), 8.03,
               _shape(4096, 32, (32, 8), 14336, 128256)),
    KnownModel((*_named("meta-llama", "Llama-3.1-70B", "Llama-3.1-70B-Instruct", "Llama-3.3-70B-Instruct"),
                "allenai/Llama-3.1-Tulu-3-70B-SFT"), 70.6,
               _shape(8192, 80, (64, 8), 28672, 128256)),
    # Mixtures of experts: Mixtral (Jiang et al. 2024, arXiv:2401.04088, table 1), Qwen3 (table 2), gpt-oss (OpenAI
    # 2025, arXiv:2508.10925, table 1), DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 4.2, without MTP)
    KnownModel(_named("mistralai", "Mixtral-8x7B-v0.1", "Mixtral-8x7B-Instruct-v0.1"), 46.7,
               replace(_shape(4096, 32, (32, 8), 14336, 32000), experts=8, active_experts=2,
                       expert_intermediate=14336)),
    KnownModel(_named("Qwen", "Qwen3-30B-A3B", "Qwen3-30B-A3B-Base"), 30.5,
               replace(_shape(2048, 48, (32, 4), 6144, 151936, head_dim=128), experts=128, active_experts=8,
                       expert_intermediate=768)),
    KnownModel(("openai/gpt-oss-20b",), 20.9,
               replace(_shape(2880, 24, (64, 8), 2880, 201088, head_dim=64), experts=32, active_experts=4,
                       expert_intermediate=2880)),
    KnownModel(_named("deepseek-ai", "DeepSeek-V3", "DeepSeek-V3-Base", "DeepSeek-R1"), 671,
               replace(_shape(7168, 61, (128, 128), 18432, 129280, head_dim=192), experts=256, active_experts=8,
                       expert_intermediate=2048, shared_intermediate=2048, dense_layers=3, attention=187_105_280,
                       cached=576)),
    # Mistral 7B (Jiang et al. 2023, arXiv:2310.06825, table 1; the vocabulary of v0.3)
    KnownModel(_named("mistralai", "Mistral-7B-v0.3", "Mistral-7B-Instruct-v0.3"), 7.25,
               _shape(4096, 32, (32, 8), 14336, 32768)),
)


def known_shape(name: str) -> ModelShape | None:
    """The shape of a model by its name on the Hub; None if it is not in the table."""
    return next((known.shape for known in KNOWN if name in known.names), None)
