"""Which tensors a whole publication consists of, known without loading any weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def pretrained_config(model: ModelConfig) -> PretrainedConfig:
    """The model's Hugging Face configuration.

    Raises:
        ModelError: there is none at that path or Hub name.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"no model configuration at {model.path!r}: {str(error).splitlines()[0]}") from error


def parameter_shapes(config: PretrainedConfig, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the causal language model that `config` describes, tied ones once, by name."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
