"""Which tensors a whole publication consists of, known without loading any weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def parameter_shapes(config: PretrainedConfig, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the causal language model that `config` describes, tied ones once, by name."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
