"""Shapes of public models, so that a configuration that names one can be planned without a network.

Each is what the model's config.json on the Hugging Face Hub says; the number of weights that follows is compared in the
tests with the one that its model card gives. Any other model is planned from its directory, or from the Hub.
"""

from dataclasses import dataclass

from rlhf_ray.planning.model_shape import ModelShape


@dataclass(frozen=True)
class KnownModel:
    """One shape, and the names under which it is published."""

    names: tuple[str, ...]
    """On the Hub; tuned variants and their base have one shape."""
    billions: float
    """Weights, as the model card says."""
    shape: ModelShape


def _named(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}/{name}" for name in names)


def _shape(hidden: int, layers: int, heads: tuple[int, int], intermediate: int, vocabulary: int, tied: bool = False,
           head_dim: int | None = None) -> ModelShape:
    return ModelShape(hidden=hidden, layers=layers, heads=heads[0], kv_heads=heads[1], intermediate=intermediate,
                      vocabulary=vocabulary, tied=tied, head_dim=head_dim)


KNOWN = (
    # Qwen2.5 (Qwen team 2024, arXiv:2412.15115, table 1)
    KnownModel(_named("Qwen", "Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct"), 0.49,
               _shape(896, 24, (14, 2), 4864, 151936, tied=True)),
    KnownModel(_named("Qwen", "Qwen2.5-1.5B", "Qwen2.5-1.5B-Instruct", "Qwen2.5-Math-1.5B"), 1.54,
               _shape(1536, 28, (12, 2), 8960, 151936, tied=True)),
    KnownModel(_named("Qwen", "Qwen2.5-3B", "Qwen2.5-3B-Instruct"), 3.09,
               _shape(2048, 36, (16, 2), 11008, 151936, tied=True)),
    KnownModel(_named("Qwen", "Qwen2.5-7B", "Qwen2.5-7B-Instruct"), 7.61,
               _shape(3584, 28, (28, 4), 18944, 152064)),
    KnownModel(_named("Qwen", "Qwen2.5-14B", "Qwen2.5-14B-Instruct"), 14.7,
               _shape(5120, 48, (40, 8), 13824, 152064)),
    KnownModel(_named("Qwen", "Qwen2.5-32B", "Qwen2.5-32B-Instruct"), 32.5,
               _shape(5120, 64, (40, 8), 27648, 152064)),
    KnownModel(_named("Qwen", "Qwen2.5-72B", "Qwen2.5-72B-Instruct"), 72.7,
               _shape(8192, 80, (64, 8), 29568, 152064)),
    # Qwen3 (Qwen team 2025, arXiv:2505.09388, table 1)
    KnownModel(_named("Qwen", "Qwen3-0.6B", "Qwen3-0.6B-Base"), 0.6,
               _shape(1024, 28, (16, 8), 3072, 151936, tied=True, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-1.7B", "Qwen3-1.7B-Base"), 1.7,
               _shape(2048, 28, (16, 8), 6144, 151936, tied=True, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-4B", "Qwen3-4B-Base"), 4.0,
               _shape(2560, 36, (32, 8), 9728, 151936, tied=True, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-8B", "Qwen3-8B-Base"), 8.2,
               _shape(4096, 36, (32, 8), 12288, 151936, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-14B", "Qwen3-14B-Base"), 14.8,
               _shape(5120, 40, (40, 8), 17408, 151936, head_dim=128)),
    KnownModel(_named("Qwen", "Qwen3-32B"), 32.8,
               _shape(5120, 64, (64, 8), 25600, 151936, head_dim=128)),
    # Llama 3 (Dubey et al. 2024, arXiv:2407.21783, table 3) and 3.2
    KnownModel(_named("meta-llama", "Llama-3.2-1B", "Llama-3.2-1B-Instruct"), 1.23,
               _shape(2048, 16, (32, 8), 8192, 128256, tied=True)),
    KnownModel(_named("meta-llama", "Llama-3.2-3B", "Llama-3.2-3B-Instruct"), 3.21,
               _shape(3072, 28, (24, 8), 8192, 128256, tied=True)),
    KnownModel((*_named("meta-llama", "Llama-3.1-8B", "Llama-3.1-8B-Instruct", "Meta-Llama-3-8B"),
                "allenai/Llama-3.1-Tulu-3-8B-SFT", "allenai/Llama-3.1-Tulu-3-8B-DPO",
                "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2", "Skywork/Skywork-Reward-V2-Llama-3.1-8B"), 8.03,
               _shape(4096, 32, (32, 8), 14336, 128256)),
    KnownModel((*_named("meta-llama", "Llama-3.1-70B", "Llama-3.1-70B-Instruct", "Llama-3.3-70B-Instruct"),
                "allenai/Llama-3.1-Tulu-3-70B-SFT"), 70.6,
               _shape(8192, 80, (64, 8), 28672, 128256)),
    # Mistral 7B (Jiang et al. 2023, arXiv:2310.06825, table 1; the vocabulary of v0.3)
    KnownModel(_named("mistralai", "Mistral-7B-v0.3", "Mistral-7B-Instruct-v0.3"), 7.25,
               _shape(4096, 32, (32, 8), 14336, 32768)),
)


def known_shape(name: str) -> ModelShape | None:
    """The shape of a model by its name on the Hub; None of one that is not in the table."""
    return next((known.shape for known in KNOWN if name in known.names), None)
