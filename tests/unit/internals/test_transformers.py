"""transformers' internals are as `rlhf_ray.internals.transformers` describes them."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_ray.internals.transformers import attention_implementation, is_checkpointed, supports_sdpa


@pytest.fixture
def model():
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=8,
                                        num_attention_heads=2))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_is_what_was_set_last(model, name):
    model.set_attn_implementation(name)
    assert attention_implementation(model) == name


def test_a_family_says_whether_it_computes_with_torch_s_attention(model):
    class Without(PreTrainedModel):
        config_class = LlamaConfig

    assert supports_sdpa(model) and not supports_sdpa(Without(LlamaConfig()))


def test_the_layers_that_checkpointing_was_enabled_for_are_known(model):
    assert not any(map(is_checkpointed, model.modules()))
    model.gradient_checkpointing_enable()
    assert [layer for layer in model.modules() if is_checkpointed(layer)] == list(model.model.layers)
