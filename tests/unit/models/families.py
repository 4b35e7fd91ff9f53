"""Tiny random language models of families as transformers has them, by their own classes."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
RIGHT: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": {"sliding_window": None}, "Gemma3": {}, "Phi3": {}, "Glm4": {},
    "GPT2": GPT2, "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
}
"""Families that packed rows leave what they are."""
WRONG: dict[str, dict[str, Any]] = {
    "Gemma2": {}, "Cohere": {}, "Granite": {"logits_scaling": 4.0},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "Bloom": {"n_layer": 2, "n_head": 4},
}
"""Soft-caps, logit scales, sinks and ALiBi, which packed attention and our output heads do not have."""


def language_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of the family in float32, with weights so large that what attention does shows in its answers."""
    import transformers

    fields = {**SHAPE, **{**RIGHT, **WRONG}[family], **changes}
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))
    for name in {"GPT2": SHAPE.keys() - {"vocab_size", "initializer_range"} - GPT2.keys(),
                 "OPT": {"num_key_value_heads", "head_dim"},
                 "Bloom": {"num_hidden_layers", "num_attention_heads"}}.get(family, ()):
        fields.pop(name, None)
    cls = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config(**fields))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
