"""Tiny random models of every family that vLLM's CPU build runs, as its kernels take them: heads of 32 values, hidden
and intermediate sizes that are multiples of 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import make_tiny_tokenizer
from tests.tiny_families import SHAPE, config_of, randomised

VOCAB = 128
"""Of the models and of their tokenizer."""
WINDOW = 16
"""Tokens of every sliding window here; rows are longer."""

OWN = {**SHAPE, "vocab_size": VOCAB}
USUAL = {**OWN, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 128}
GROUPED = {**USUAL, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
ONE_WINDOW = {**GROUPED, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MIXTURE = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "rope_theta": 1e4}
LATENT = {**USUAL, "num_key_value_heads": 2, "kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 1,
          "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
          "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Of what a DeepSeek-V3 has, what vLLM's kernels for CPUs fix is as large: kv_lora_rank and qk_rope_head_dim."""
GPT = {**OWN, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
SCALED = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, GROUPED) for family in (
        "llama", "qwen2", "qwen3", "gemma", "phi3", "olmo", "olmo2", "granite", "glm", "glm4", "starcoder2")},
    "mistral": ("mistral", {**GROUPED, "sliding_window": None}),
    "mistral, window": ("mistral", {**GROUPED, "sliding_window": WINDOW}),
    **{family: (family, {**ONE_WINDOW, "hidden_size": 64, "query_pre_attn_scalar": 32})
       for family in ("gemma2", "gemma3_text")},
    "granite, scaled": ("granite", {**GROUPED, **SCALED, "logits_scaling": 4.0}),
    "smollm3": ("smollm3", {**GROUPED, "no_rope_layers": [1, 0]}),
    "cohere": ("cohere", {**GROUPED, "logit_scale": 0.3}),
    "cohere2": ("cohere2", {**GROUPED, "logit_scale": 0.3, "layer_types": ["full_attention"] * 2}),
    "starcoder2, window": ("starcoder2", {**GROUPED, "sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {**USUAL, "rotary_pct": 0.5}), "phi": ("phi", USUAL), "gpt2": ("gpt2", GPT),
    "nemotron": ("nemotron", GROUPED), "stablelm": ("stablelm", GROUPED),
    "opt": ("opt", {**OWN, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "max_position_embeddings": 128, "word_embed_proj_dim": 64}),
    "falcon": ("falcon", {**OWN, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "falcon, new": ("falcon", {**OWN, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                               "num_kv_heads": 2, "new_decoder_architecture": True}),
    "bloom": ("bloom", {**OWN, "hidden_size": 64, "n_layer": 2, "n_head": 2}),
    "mixtral": ("mixtral", {**MIXTURE, "num_local_experts": 4, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {**MIXTURE, "shared_expert_intermediate_size": 64}), "qwen3_moe": ("qwen3_moe", MIXTURE),
    "gpt_oss": ("gpt_oss", {**ONE_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "deepseek_v3": ("deepseek_v3", LATENT), "deepseek_v3, yarn": ("deepseek_v3", {**LATENT, "rope_parameters": YARN}),
}
"""`model_type` and shape by name."""
UNTIED = frozenset({"gpt_oss", "deepseek_v3", "deepseek_v3, yarn"})
"""Models whose tied head vLLM ignores."""
TIED = frozenset({"bloom", "cohere", "cohere2", "gemma2"})
"""Models that vLLM takes for tied."""


def make_model(directory: Path, name: str, seed: int, dtype: Any, tied: bool) -> Any:
    """A random model of `MODELS`, saved with a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    family, shape = MODELS[name]
    config = config_of(family, **{**shape, "tie_word_embeddings": tied})
    torch.manual_seed(seed)
    model = randomised(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed).to(dtype)
    model.save_pretrained(directory)
    make_tiny_tokenizer(directory, VOCAB)
    return model
