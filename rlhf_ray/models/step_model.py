"""A process reward model on packed rows: a language model that is asked at placeholder tokens alone."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf_ray.models.packed_model import hidden_states
from rlhf_ray.models.packing import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedStepModel(nn.Module):
    """A causal language model that answers with what it predicts at the placeholders."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, packing: Packing, placeholders: Tensor) -> Tensor:
        """[P, V] logits at the placeholders; no others are ever made.

        Args:
            tokens: [T] int64 packed rows.
            placeholders: [P] their flat positions. Each answer has seen its row up to and including the placeholder.
        """
        hidden = hidden_states(self.model, tokens, packing).index_select(0, placeholders)
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


def good_probabilities(logits: Tensor, good: int, bad: int) -> Tensor:
    """[P] float32 probability of the good token among the two, from `[P, V]` logits (Wang et al. 2024, section 3.3)."""
    return (logits[:, good].float() - logits[:, bad].float()).sigmoid()
