"""Compares a generator's log-probabilities of given tokens with those of transformers' model with the same weights.

vLLM has models of its own, which read config.json on their own: an entry that only one of the two reads gives two
models of the same weights. The gap of two models is the root mean square, over tokens, of the difference of their
log-probabilities, in nats. `typical_gap`, the median, does not depend on a few tokens: rounding sends some of a mixture
of experts to other experts, while weights that are not the learner's change all log-probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.float32_head import ConvertedHead, use_float32_head
from rlhf_ray.models.parity import NOISE, SEED
from rlhf_ray.models.parity_pass import embedding_as_leaf
from rlhf_ray.records import GivenTokens, Rollout, offsets_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOLERATED = {"float32": 1e-4, "bfloat16": 0.05}
"""Tolerated gap between a generator and another implementation of its model, in nats, by the lower precision of the
two, in addition to `NOISE` times what rounding does to these log-probabilities."""
SMALLEST = 0.1
"""The part of `TOLERATED` that is tolerated after a publication, when the gap of the same two implementations is known.
That may be 0: a log-probability of -20 is a multiple of 2e-6 in float32.
"""
LENGTHS = (31, 21, 13, 8)
"""Tokens of the rows that are compared: few, so that a comparison after each publication costs next to nothing."""
SAMPLED = 8
"""Tokens that are sampled after a long row. vLLM returns log-probabilities of a whole row only with memory for all of
its logits."""


def tolerated_gap(precision: str, noise: float) -> float:
    """How large a gap rounding explains.

    Args:
        noise: gap between two passes of one implementation that differ by rounding.
    """
    return TOLERATED[precision] + NOISE * noise


def tolerated_later(precision: str, noise: float, first_gap: float, first_noise: float) -> float:
    """How large a typical gap rounding explains after a publication, if that of version 0 was `first_gap`. It grows
    with what rounding does to the log-probabilities (`noise`), as when a policy becomes more certain."""
    growth = max(1.0, noise / first_noise) if first_noise else 1.0
    return SMALLEST * TOLERATED[precision] + NOISE * (first_gap * growth + noise)


def logprob_gap(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Root mean square of the differences of `[n]` log-probabilities, in nats; infinite if one of a pair is not finite,
    and the other is not the same."""
    return float(np.sqrt(np.mean(np.square(_apart(one, other)))))


def typical_gap(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """As `logprob_gap`: the median of the absolute differences."""
    return float(np.median(np.abs(_apart(one, other))))


def _apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, 0.0, one.astype(np.float64) - other)
    return np.where(np.isnan(apart), np.inf, apart)


def given_rows(config: PretrainedConfig, longest: int, lengths: tuple[int, ...] = LENGTHS) -> GivenTokens:
    """Rows of random tokens, always the same for a model, of at most `longest` tokens. All but the first of each row
    are compared."""
    text = config.get_text_config()
    ids = np.array([i for i in range(text.vocab_size) if i != text.pad_token_id], dtype=np.int32)
    offsets = offsets_of([max(2, min(length, longest)) for length in lengths])
    tokens = np.random.default_rng(SEED).choice(ids, int(offsets[-1]))
    compared = np.ones(len(tokens), dtype=bool)
    compared[offsets[:-1]] = False
    return GivenTokens(offsets, tokens, compared)


class TransformersReference:
    """transformers' own model with the weights in a directory, with its "eager" attention, and its logits in float32 if
    the configuration says so."""

    def __init__(self, model: ModelConfig, device: str = "cpu") -> None:
        """Load it."""
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=getattr(torch, model.dtype), attn_implementation="eager", use_safetensors=True,
            **model.trust)
        if model.float32_head:
            use_float32_head(loaded, ConvertedHead)
        self.model = loaded.to(device).eval()

    @torch.no_grad()
    def logprobs(self, rows: GivenTokens | Rollout) -> NDArray[np.float32]:
        """[n] log-probabilities of the compared tokens, each row in a pass of its own."""
        device, parts = next(self.model.parameters()).device, []
        for row in range(len(rows)):
            tokens = torch.from_numpy(rows.row(row, "tokens").astype(np.int64)).to(device)
            logits = self.model(tokens[None], use_cache=False).logits[0, :-1].float()
            chosen: Tensor = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].cpu()
            parts.append(chosen.numpy()[rows.row(row, "response_mask")[1:]])
        return np.concatenate(parts)

    def tolerated(self, rows: GivenTokens | Rollout, expected: NDArray[np.float32]) -> float:
        """`tolerated_gap` of a generator from `expected`, which are the log-probabilities of these rows."""
        with embedding_as_leaf(self.model, rounding=torch.finfo(self.model.dtype).eps / 2):
            noise = logprob_gap(self.logprobs(rows), expected)
        return tolerated_gap(str(self.model.dtype).removeprefix("torch."), noise)
