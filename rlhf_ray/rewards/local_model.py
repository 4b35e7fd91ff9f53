"""A local reward model as a source: the policy's token ids where both read them alike, texts of its own otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import ModelReward
from rlhf_ray.data.batching import micro_batches
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import RewardError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.rewards.answers import finite_scores
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, sample_names
from rlhf_ray.rewards.transcript import encode_request

if TYPE_CHECKING:
    from rlhf_ray.models.classifier import Classifier, EncodedRow


class ModelSource:
    """Scores prompt and response by a one-label sequence classifier."""

    def __init__(self, name: str, config: ModelReward, policy: ModelConfig, micro_batch_tokens: int) -> None:
        """
        Args:
            policy: whose tokenizer made the requests' token ids.
            micro_batch_tokens: most tokens of one forward pass.
        """
        self._name, self._config, self._policy, self._budget = name, config, policy, micro_batch_tokens
        self._busy = asyncio.Lock()

    async def start(self) -> None:
        """Load the model. Raises ModelError when there is none, or it has no one-label head."""
        await asyncio.to_thread(self._load)

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """One score per response.

        Raises:
            RewardError: a score is not finite, or a text is over the model's context; names the samples.
        """
        async with self._busy:
            return await asyncio.to_thread(self._score, requests)

    async def stop(self) -> None:
        """Nothing to let go of: the model ends with the process."""

    def _load(self) -> None:
        from rlhf_ray.models.classifier import Classifier

        self._model: Classifier = Classifier(self._config)
        self._tokenizer = load_tokenizer(self._config)
        self._same_ids = (not self._model.reads_pairs
                          and tokenizer_digest(self._tokenizer) == tokenizer_digest(load_tokenizer(self._policy)))

    def _score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        rows = [self._encode(request) for request in requests]
        lengths = np.array([len(row.ids) for row in rows])
        self._check_context(requests, lengths)
        scores = self._model.scores(rows, micro_batches(lengths, max(self._budget, int(lengths.max()))))
        return RewardAnswer(finite_scores(
            scores, requests, f"the reward model {self._config.path!r} (rewards.{self._name})",
            "mend the model (a NaN usually means its weights are damaged or its precision too low)."))

    def _encode(self, request: RewardRequest) -> EncodedRow:
        from rlhf_ray.models.classifier import EncodedRow

        if self._same_ids:
            return EncodedRow(request.tokens)
        return encode_request(request, self._tokenizer, pair=self._model.reads_pairs)

    def _check_context(self, requests: Sequence[RewardRequest], lengths: np.ndarray) -> None:
        longest = self._model.longest
        over = np.flatnonzero(lengths > (longest or np.inf))
        if len(over):
            keys = sample_names([requests[i].key for i in over])
            raise RewardError(
                f"{len(over)} samples ({keys}) have up to {lengths.max()} tokens by the tokenizer of the reward model "
                f"{self._config.path!r} (rewards.{self._name}), over its context of {longest}: lower "
                "prompts.max_tokens or generator.sampling.max_tokens, or use a model of longer context")
