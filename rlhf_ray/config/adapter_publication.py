"""How a policy with adapters reaches its generators: the adapters alone, which vLLM computes with beside the frozen
base, or weights with the adapters merged in."""

from rlhf_ray.config.derived import transport_of
from rlhf_ray.config.stages import PPOConfig

ADAPTER_FAMILIES = frozenset({
    "cohere", "gemma", "gemma3_text", "glm", "gpt_neox", "granite", "llama", "mistral", "olmo", "olmo2",
    "opt", "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"})
"""Families (`model_type`) for which vLLM's LoRA was tested against transformers with merged weights."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM 0.32 reserves memory (`MaxLoRARanks` in vllm/config/lora.py); a lower one is padded."""
OUTPUT_HEAD = "lm_head"


def why_merged(config: PPOConfig, family: str) -> str:
    """Why a publication of a policy with adapters contains merged weights; "" if it contains the adapters.

    Args:
        family: `model_type` of the policy's config.json.

    Raises:
        ValueError: the policy has no adapters.
    """
    lora, generator, transport = config.policy.lora, config.generator, transport_of(config)
    if lora is None:
        raise ValueError("policy.lora is empty, so there are no adapters to publish")
    if family not in ADAPTER_FAMILIES:
        return f"vLLM's LoRA is not tested with the family {family!r}"
    if lora.rank > RANKS[-1]:
        return f"policy.lora.rank={lora.rank} is more than vLLM's largest, {RANKS[-1]}"
    if any(target.rpartition(".")[2] == OUTPUT_HEAD for target in lora.targets):
        return f"policy.lora.targets={lora.targets} contains the output head"
    if transport != "object_store":
        return f"weights.transport={transport} sends whole tensors from GPU to GPU"
    if generator.sleep_level == 2:
        return "generator.sleep_level=2 discards the frozen base"
    if generator.pipeline_parallel > 1:
        return f"generator.pipeline_parallel={generator.pipeline_parallel} divides the layers among processes"
    return ""


def publishes_adapters(config: PPOConfig, family: str) -> bool:
    """Whether publications contain the policy's adapters alone; `family` as for `why_merged`."""
    return config.policy.lora is not None and not why_merged(config, family)
