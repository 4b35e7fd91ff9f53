"""Tiny random models in memory, and rows of tokens for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_ray.models.attention import register
from rlhf_ray.models.packing import Packing

VOCABULARY = 48
LENGTHS = [5, 1, 9, 3]


@pytest.fixture(scope="session")
def causal_lm() -> Callable[..., Any]:
    """causal_lm(tied, kv_heads, attention): the same weights for the same arguments but the attention."""

    def build(tied: bool = True, kv_heads: int = 4, attention: str | None = None, dtype: torch.dtype = torch.float32):
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = LlamaForCausalLM(LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=64,
                tie_word_embeddings=tied, initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
            ))
        model.set_attn_implementation(attention or register())
        return model.to(dtype).eval()

    return build


@pytest.fixture
def packing() -> Packing:
    """Four rows of 5, 1, 9 and 3 tokens."""
    return Packing.of(LENGTHS)


@pytest.fixture
def tokens() -> torch.Tensor:
    """[18] token ids of those rows."""
    return torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
