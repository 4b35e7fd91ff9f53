"""Which runs publish adapters alone."""

import re

import pytest

from rlhf_ray.config.adapter_publication import publishes_adapters, why_merged
from rlhf_ray.config.load import STAGES, load

LORA, GPUS = "--policy.lora={}", "--pools.default.gpus=2"


@pytest.fixture
def loaded(write):
    """loaded(*overrides): the configuration of a PPO run."""
    return lambda *overrides: load(STAGES["ppo"], write("ppo"), list(overrides))


def test_adapters_travel_alone_where_vllm_computes_with_them(loaded):
    assert publishes_adapters(loaded(LORA), "llama") and why_merged(loaded(LORA), "llama") == ""
    assert publishes_adapters(loaded("--policy.lora.rank=512"), "llama")


def test_a_policy_without_adapters_publishes_weights(loaded):
    assert not publishes_adapters(loaded(), "llama")
    with pytest.raises(ValueError, match=r"policy\.lora is empty"):
        why_merged(loaded(), "llama")


@pytest.mark.parametrize(("family", "overrides", "reason"), [
    ("gpt2", [LORA], "family 'gpt2'"),
    ("llama", ["--policy.lora.rank=513"], r"policy\.lora\.rank=513 is more than vLLM's largest, 512"),
    ("llama", ['--policy.lora.targets=["q_proj", "lm_head"]'], r"policy\.lora\.targets=\['q_proj', 'lm_head'\]"),
    ("llama", [LORA, GPUS, "--policy.gpus=1", "--generator.gpus=1", "--weights.transport=nccl"], r"transport=nccl"),
    ("llama", [LORA, GPUS, "--generator.gpus=1", "--generator.sleep_level=2"], r"generator\.sleep_level=2"),
    ("llama", [LORA, GPUS, "--generator.gpus=2", "--generator.pipeline_parallel=2"], r"generator\.pipeline_parallel=2"),
])
def test_elsewhere_they_are_merged_and_the_reason_is_known(loaded, family, overrides, reason):
    config = loaded(*overrides)
    assert not publishes_adapters(config, family)
    assert re.search(reason, why_merged(config, family))
