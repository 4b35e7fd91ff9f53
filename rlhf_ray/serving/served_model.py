"""The model of the service: converts samples to token rows, like a local reward model, and rows to scores."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.answers import TurnEnds
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import RewardError
from rlhf_ray.models.classifier import Classifier, EncodedRow
from rlhf_ray.models.loading import check_model_directory, check_scalar_head, label_names, load_tokenizer
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.rewards.request_encoding import encode_for
from rlhf_ray.serving.schema import Sample

NOTHING = np.empty(0, dtype=np.int32)


class BadSampleError(ValueError):
    """A sample that this model cannot score; says which and why."""


class ServedModel:
    """A loaded reward model.

    Raises:
        ModelError: the model does not exist, is not a classifier with this label, or its tokenizer does not match.
    """

    def __init__(self, config: ModelConfig, max_batch_tokens: int, label: str | None = None) -> None:
        """`label`: name or number of one of several labels, whose logit is the score."""
        check_model_directory(config, "MODEL", argument=True)
        number = check_scalar_head(config, label=label, label_field="--label")
        self.path, self.dtype = config.path, config.dtype
        self._tokenizer, self._model = load_tokenizer(config, require_eos=False), Classifier(config, number)
        ends_responses = not self._model.is_encoder and self._tokenizer.eos_token_id is not None
        self._ends = TurnEnds.of(self._tokenizer, config) if ends_responses else None
        self.tokenizer_digest = tokenizer_digest(self._tokenizer)
        parts: list[Any] = [self._model.digest(), self.tokenizer_digest, self._tokenizer.chat_template]
        if len(label_names(config)) > 1:
            parts.append(number)
        self.digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        self.max_tokens = min(self._model.longest or max_batch_tokens, max_batch_tokens)
        self._model.compare(f"the reward model {config.path!r}", self.max_tokens, max_batch_tokens)

    def rows(self, samples: Sequence[Sample]) -> list[EncodedRow]:
        """Token ids of each sample.

        Raises:
            BadSampleError: a sample that is empty, too long, has an id outside the vocabulary, or that the model's chat
                template refuses.
        """
        rows = [self._row(i, sample) for i, sample in enumerate(samples)]
        for i, row in enumerate(rows):
            if not 0 < len(row.ids) <= self.max_tokens:
                raise BadSampleError(f"samples.{i} has {len(row.ids)} tokens; the service takes 1 to {self.max_tokens}")
        return rows

    def _row(self, i: int, sample: Sample) -> EncodedRow:
        if sample.tokens is None:
            try:
                sample.model_dump_json()  # a tokenizer's error about half a surrogate pair would be the service's
                return encode_for(self._model, _request(i, sample), self._tokenizer, self._ends)
            except (RewardError, ValueError) as error:
                raise BadSampleError(f"samples.{i}: {error}") from None
        if max(sample.tokens) >= self._model.vocabulary:
            raise BadSampleError(f"samples.{i}.tokens has id {max(sample.tokens)}, but the model's vocabulary ends at "
                                 f"{self._model.vocabulary - 1}; send texts, or ids of its own tokenizer")
        return EncodedRow(np.array(sample.tokens, dtype=np.int32))

    def score(self, rows: Sequence[EncodedRow]) -> NDArray[np.float32]:
        """[N] one score per row, finite or not, from one forward pass."""
        return self._model.scores(rows, [np.arange(len(rows))])


def _request(i: int, sample: Sample) -> RewardRequest:
    """The sample as the protocol of reward sources has it."""
    return RewardRequest(
        key=SampleKey(0, i, 0), prompt=sample.prompt or "", response=sample.response or "", tokens=NOTHING,
        response_mask=NOTHING.astype(bool), finish_reason="stop" if sample.finished else "length",
        metadata=sample.metadata or {}, messages=sample.messages,
        prefill=sample.prefill,
    )
