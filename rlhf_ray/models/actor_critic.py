"""One backbone for policy and critic: a language model with a value head beside its language head."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf_ray.algorithms.masking import wide
from rlhf_ray.models.packed_model import CHUNKS, Chunks, hidden_states, token_answers
from rlhf_ray.models.packing import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedActorCritic(nn.Module):
    """Answers with log-probabilities of tokens and with values of the states before them, out of one forward pass.

    The value head is no part of `model`: what is published to generators and exported is the language model alone.
    """

    def __init__(self, model: "PreTrainedModel", temperature: float = 1.0, chunks: Chunks = CHUNKS) -> None:
        super().__init__()
        self.model, self.temperature, self.chunks = model, temperature, chunks
        self.value_head = nn.Linear(model.config.hidden_size, 1, bias=False)
        nn.init.normal_(self.value_head.weight, std=(model.config.hidden_size + 1) ** -0.5)  # as `load_scalar_model`

    def forward(
        self, tokens: Tensor, packing: Packing, predicted: Tensor, entropy: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """As `PackedLanguageModel.forward`, and with [n] float32 values of the states before the tokens asked about."""
        hidden = hidden_states(self.model, tokens, packing).index_select(0, predicted - 1)
        logprobs, entropies = token_answers(self.model, hidden, tokens[predicted], temperature or self.temperature,
                                            self.chunks, entropy)
        values = self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1)
        return logprobs, entropies, wide(values)
