"""Transformers models on packed rows without padding: token log-probabilities, scalar heads, LoRA, loading."""
