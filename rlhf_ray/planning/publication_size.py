"""What a publication of the policy's weights contains, and its size."""

from rlhf_ray.config.adapter_publication import publishes_adapters, why_merged
from rlhf_ray.config.derived import bucket_mb
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.planning.learner_memory import adapter_parameters
from rlhf_ray.planning.memory_breakdown import MIB, gib
from rlhf_ray.planning.model_shape import ModelShape

LIKE_LLAMA = "llama"
"""Family of shapes without one, which are from the table of known models: publications of all these are alike."""


def adapter_bytes(config: PPOConfig, shape: ModelShape) -> float | None:
    """Bytes of a publication that contains adapters alone, if they are on every linear layer; None if it contains
    weights."""
    lora = config.policy.lora
    if lora is None or not publishes_adapters(config, shape.family or LIKE_LLAMA):
        return None
    return float(adapter_parameters(shape, lora.rank) * shape.bytes_per_value)


def publication_bytes(config: PPOConfig, shape: ModelShape) -> float:
    """Bytes of one publication."""
    adapters = adapter_bytes(config, shape)
    return float(shape.weight_bytes) if adapters is None else adapters


def bucket_bytes(config: PPOConfig, shape: ModelShape) -> float:
    """Bytes of the largest bucket of a publication, which holds the largest tensor, the embedding, at least."""
    embedding = shape.vocabulary * shape.hidden * shape.bytes_per_value
    return min(publication_bytes(config, shape), max(bucket_mb(config) * float(MIB), embedding))


def publication_in_words(config: PPOConfig, shape: ModelShape) -> str:
    """One publication, for people."""
    sent, whole = publication_bytes(config, shape), shape.weight_bytes
    size = f"{gib(sent)} to each node after every step"
    if config.policy.lora is None:
        return size
    if reason := why_merged(config, shape.family or LIKE_LLAMA):
        return f"up to {size}: weights with the adapters merged in, because {reason}"
    return f"{size}: the adapters alone, {sent / whole:.2%} of the weights"
