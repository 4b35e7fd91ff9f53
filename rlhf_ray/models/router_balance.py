"""Router logits of a mixture of experts in training passes, and the loss that balances the routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_ray.algorithms.losses.load_balancing import load_balancing_loss
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.errors import ModelError
from rlhf_ray.internals.transformers import router_output
from rlhf_ray.models.config_json import pretrained_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BALANCED_FAMILIES = ("gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Families (`model_type`) whose routers can be balanced: transformers trains them with this loss."""


def check_router(model: ModelConfig | NewModelConfig, section: str, coef: float) -> None:
    """Reject an auxiliary loss of routers for a model without routers.

    Args:
        section: the section of the configuration of the learner.
        coef: its `router_aux_loss_coef`.

    Raises:
        ModelError: names the field, its value, the family and what to do.
    """
    if not coef:
        return
    if isinstance(model, NewModelConfig):
        family: str = model.architecture.family
    else:
        family = pretrained_config(model).model_type
    if family not in BALANCED_FAMILIES:
        raise ModelError(f"{section}.router_aux_loss_coef={coef:g} balances the routers of a mixture of experts, but "
                         f"transformers trains no routers of the family {family!r} with this loss; set it to 0, or use "
                         f"a model of one of the families {', '.join(BALANCED_FAMILIES)}")


class RouterBalance:
    """Records the router logits of a model's training passes by hooks.

    Padding is left out, also the filler at the end of a packed pass. What activation checkpointing computes again in
    the backward pass is not recorded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        router, self._index = router_output(model)
        self._top_k = int(model.config.get_text_config().num_experts_per_tok)
        self._counted: slice | Tensor = slice(None)
        """Which of the pass's tokens count."""
        self._recording = False
        self._logits: list[Tensor] = []
        model.get_decoder().register_forward_pre_hook(self._begin, with_kwargs=True)
        model.get_decoder().register_forward_hook(self._end)
        for layer in model.modules():
            if isinstance(layer, router):
                layer.register_forward_hook(self._record)

    def loss(self) -> Tensor:
        """`load_balancing_loss` of the last pass with gradients."""
        logits, self._logits = self._logits, []
        # Selected here: within a checkpointed layer, the backward pass would miss what selecting saves.
        return load_balancing_loss([of_layer[self._counted] for of_layer in logits], self._top_k)

    def _begin(self, _: nn.Module, __: Any, keywords: Mapping[str, Any]) -> None:
        packing: Any = keywords.get("packing")
        mask: Any = keywords.get("attention_mask")
        self._recording = torch.is_grad_enabled() and not (packing is None and mask is None)
        if self._recording:
            self._counted = slice(packing.tokens) if mask is None else mask.flatten().bool()
            self._logits = []

    def _end(self, *_: Any) -> None:
        self._recording = False

    def _record(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._recording:
            self._logits.append(output[self._index])
