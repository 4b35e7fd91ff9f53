"""Corrections of vLLM's models whose results differ from those of transformers. vLLM imports them when needed."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.models.bloom import BloomForCausalLM


class Bloom(BloomForCausalLM):
    """Bloom with the tanh approximation of GELU.

    The activation is not in Bloom's configuration. transformers has the approximation (`bloom_gelu_forward`), vLLM
    0.32.0 the exact GELU (`BloomMLP.gelu_impl`), with which log-probabilities differ by about 0.001.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for block in self.transformer.h:
            if hasattr(block, "mlp"):  # else it is in another stage of a pipeline
                block.mlp.gelu_impl = get_act_fn("gelu_pytorch_tanh")
