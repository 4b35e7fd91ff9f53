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

WINDOW = 7
"""A sliding window that most rows in tests exceed."""
RECURRENT = {
    **GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
    "n_groups": 1, "n_group": 1, "topk_group": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "attn_layer_indices": [1], "num_hidden_layers": 4,
    "num_heads": 4, "attn_layer_offset": 1, "attn_layer_period": 2,
}
"""For families with recurrent layers; each reads what it knows."""

DECODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma", "glm", "glm4", "llama", "olmo", "olmo2", "phi3", "qwen3", "smollm3"), GROUPED),
    **{name: {**USUAL, "num_key_value_heads": 2} for name in ("gpt_neox", "nemotron", "phi", "stablelm")},
    **{name: {**GROUPED, "sliding_window": WINDOW} for name in ("mistral", "olmo3", "starcoder2")},
    "qwen2": {**GROUPED, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {**GROUPED, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**GROUPED, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {**GROUPED, "logit_scale": 0.5},
    "cohere2": {**GROUPED, "logit_scale": 0.5, "sliding_window": WINDOW},
    "granite": {**GROUPED, "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "mixtral": {**MIXTURE, "num_local_experts": 4, "sliding_window": WINDOW}, "qwen3_moe": MIXTURE,
    "qwen2_moe": {**MIXTURE, "shared_expert_intermediate_size": 32, "sliding_window": WINDOW,
                  "use_sliding_window": True, "max_window_layers": 2},
    "gpt_oss": {**MIXTURE, "num_local_experts": 4, "sliding_window": WINDOW,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": {
        **USUAL, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    "gpt2": SMALL_GPT, "opt": SMALL_OPT, "bloom": SMALL_BLOOM,
    "falcon": {**USUAL, "alibi": True, "new_decoder_architecture": False},
    "mpt": {**SHAPE, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
    **dict.fromkeys(("bamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
                     "qwen3_next", "recurrent_gemma"), RECURRENT),
}
"""Shapes of families whose passes are right, by `model_type`; windows are shorter than most rows."""


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
