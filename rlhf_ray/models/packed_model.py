"""Transformers models run on packed rows: token log-probabilities of a language model, one number per token of a
scalar model. These are the modules that DeepSpeed wraps, so all computation with parameters happens in `forward`."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_ray.algorithms.logprobs import entropy as entropy_of
from rlhf_ray.algorithms.logprobs import token_logprobs
from rlhf_ray.algorithms.masking import wide
from rlhf_ray.models.packing import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hidden_states(model: "PreTrainedModel", tokens: Tensor, packing: Packing) -> Tensor:
    """[T, hidden] last hidden states of packed rows."""
    output = model.base_model(
        input_ids=tokens[None], position_ids=packing.positions[None], use_cache=False, packing=packing
    )
    return output.last_hidden_state[0]


def token_answers(
    model: "PreTrainedModel", hidden: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """[n] log-probabilities of `targets` [n] given the states `hidden` [n, hidden] before them, and [n] entropies or
    None. Logits exist for at most `chunk` of them at a time."""
    head, logprobs, entropies = model.get_output_embeddings(), [], []
    for start in range(0, max(len(targets), 1), chunk):
        logits = head(hidden[start : start + chunk])[None]
        logprobs.append(token_logprobs(logits, targets[None, start : start + chunk], temperature)[0])
        if entropy:
            entropies.append(entropy_of(wide(logits) / temperature)[0])
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


class PackedLanguageModel(nn.Module):
    """A causal language model that answers with log-probabilities of tokens it is shown."""

    def __init__(self, model: "PreTrainedModel", temperature: float = 1.0, chunk: int = 4096) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk = chunk

    def forward(
        self, tokens: Tensor, packing: Packing, predicted: Tensor, entropy: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the tokens at `predicted` given what precedes them in their row.

        Logits exist only for those positions, and for at most `chunk` of them at a time.

        Args:
            tokens: [T] int64 packed rows.
            packing: where the rows lie.
            predicted: [n] flat positions of the tokens asked about; never the first of a row.
            entropy: also return the entropy of the distribution each was drawn from.
            temperature: where it is not the model's.

        Returns:
            [n] float32 log-probabilities at the temperature, and [n] entropies in nats or None.
        """
        hidden = hidden_states(self.model, tokens, packing).index_select(0, predicted - 1)
        return token_answers(self.model, hidden, tokens[predicted], temperature or self.temperature, self.chunk,
                             entropy)


class PackedScalarModel(nn.Module):
    """A backbone with a scalar head: a critic (one value per token) or a reward model (one score per row)."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """[T] float32 head outputs, one at each token, having seen the row up to and including it."""
        hidden = hidden_states(self.model, tokens, packing)
        return self.model.score(hidden.to(self.model.score.weight.dtype)).squeeze(-1).float()


def last_token_scores(outputs: Tensor, packing: Packing) -> Tensor:
    """[N] output at each row's last token: a reward model's score of the row."""
    return outputs[packing.ends - 1]


def values_before_tokens(outputs: Tensor, predicted: Tensor) -> Tensor:
    """[n] critic's value of the state *before* each token at `predicted`, which is its output one token earlier."""
    return outputs[predicted - 1]
