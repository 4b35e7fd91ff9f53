"""Tiny random models of many families, without a tokenizer."""

from __future__ import annotations

from typing import Any

SHAPE = {"vocab_size": 64, "num_labels": 1, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
USUAL = {**SHAPE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 32, "initializer_range": 0.2}
GROUPED = {**USUAL, "num_key_value_heads": 1, "head_dim": 16}
MIXTURE = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL_GPT = {**SHAPE, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.2}
SMALL_OPT = {**SHAPE, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 32, "word_embed_proj_dim": 32, "init_std": 0.2}
SMALL_BLOOM = {**SHAPE, "hidden_size": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}

DECODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma", "glm", "glm4", "llama", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
                     "starcoder2"), GROUPED),
    **dict.fromkeys(("gpt_neox", "phi"), USUAL),
    "mistral": {**GROUPED, "sliding_window": 32},
    "gemma3_text": {**GROUPED, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {**MIXTURE, "num_local_experts": 4}, "qwen3_moe": MIXTURE,
    "qwen2_moe": {**MIXTURE, "shared_expert_intermediate_size": 32},
    "gpt2": SMALL_GPT, "opt": SMALL_OPT,
    "granite": GROUPED,
}
"""Shapes of families whose packed passes are right, as language models, by `model_type`."""


def config_of(family: str, **shape: Any) -> Any:
    """The configuration of a family, of this shape."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**shape)


def randomised(model: Any, seed: int = 0) -> Any:
    """The model with every matrix and bias random and uneven, so that a comparison notices what is left out of it."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            elif "norm" not in name and "ln_" not in name:
                parameter.normal_(std=0.3)
    return model.eval()
