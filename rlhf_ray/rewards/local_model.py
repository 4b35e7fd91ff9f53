"""A local reward model as a source: the policy's token ids where both read them alike, texts of its own otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlhf_ray.config.rewards import ModelReward
from rlhf_ray.data.batching import micro_batches
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.rewards.answers import finite_scores
from rlhf_ray.rewards.local_source import LocalSource
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest
from rlhf_ray.rewards.transcript import encode_request

if TYPE_CHECKING:
    from rlhf_ray.models.classifier import Classifier, EncodedRow


class ModelSource(LocalSource[ModelReward]):
    """Scores prompt and response by a one-label sequence classifier."""

    KIND = "reward model"

    def _load(self) -> Mapping[str, float]:
        from rlhf_ray.models.classifier import Classifier

        self._model: Classifier = Classifier(self._config)
        self._tokenizer = load_tokenizer(self._config)
        self._same_ids = (not self._model.reads_pairs
                          and tokenizer_digest(self._tokenizer) == tokenizer_digest(load_tokenizer(self._policy)))
        return self._model.compare(self._who, self._rows, self._budget)

    def _score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        rows = [self._encode(request) for request in requests]
        lengths = np.array([len(row.ids) for row in rows])
        self._check_context(requests, lengths, self._model.longest)
        scores = self._model.scores(rows, micro_batches(lengths, max(self._budget, int(lengths.max()))))
        return RewardAnswer(finite_scores(
            scores, requests, self._who,
            "fix the model (a NaN usually means its weights are damaged or its precision too low)."))

    def _encode(self, request: RewardRequest) -> EncodedRow:
        from rlhf_ray.models.classifier import EncodedRow

        # A policy may have more embeddings than there are tokens, and draw ids of them. They say nothing.
        if self._same_ids and request.tokens.max() < self._model.vocabulary:
            return EncodedRow(request.tokens)
        return encode_request(request, self._tokenizer, pair=self._model.reads_pairs)
