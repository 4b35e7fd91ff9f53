"""Reward models in the scorer's process: the base of such sources, and `ModelSource` for sequence classifiers.

`ModelSource` reads the policy's token ids if both models share the vocabulary, and retokenised texts otherwise."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import ModelReward
from rlhf_ray.data.answers import TurnEnds
from rlhf_ray.data.batching import RowNumbers, inference_plan, rows_of_rank
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import SampleError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.shard import WHOLE, Shard
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, RewardSource, finite_scores, sample_names
from rlhf_ray.rewards.request_encoding import encode_for

if TYPE_CHECKING:
    from rlhf_ray.models.classifier import Classifier, EncodedRow


Config = TypeVar("Config", bound=ModelConfig)
Result = TypeVar("Result")
PROBED = 1024
"""Tokens of the longest row in a comparison with transformers if the length of rows is unknown."""


class LocalSource(RewardSource, ABC, Generic[Config]):
    """Loads and runs its model in a thread, so that the event loop is not blocked; it is freed with the process."""

    KIND: ClassVar[str]
    """The kind of model, for messages: "reward model"."""

    def __init__(self, name: str, config: Config, policy: ModelConfig, micro_batch_tokens: int,
                 longest: int = PROBED, shard: Shard = WHOLE, turn: asyncio.Lock | None = None) -> None:
        """
        Args:
            name: the component's name in `rewards`.
            policy: the model whose tokenizer gave the requests' token ids.
            micro_batch_tokens: most tokens of one forward pass; a longer row is processed alone.
            longest: most tokens of the policy's rows.
            shard: the part of the model in this process.
            turn: held during passes. Sources with sharded models share one, so that all ranks make the passes of
                different models in the same order.
        """
        self._shard = shard
        self._config, self._policy, self._budget, self._rows = config, policy, micro_batch_tokens, longest
        self._who = f"the {self.KIND} {config.path!r} (rewards.{name})"
        self._field = f"rewards.{name}"
        self._busy = turn or asyncio.Lock()

    async def start(self) -> Mapping[str, float]:
        """Load the model; returns the measurements of `ParityProbe.check`. Raises ModelError when the model is missing,
        is of another kind, or gives other results on packed rows."""
        async with self._busy:
            return await asyncio.to_thread(self._load)

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """Score every response.

        Raises:
            RewardError: the model gives a score that is not finite, or a row is over its context; names the samples.
        """
        async with self._busy:
            return await asyncio.to_thread(self._score, requests)

    @abstractmethod
    def _load(self) -> Mapping[str, float]:
        """Load model and tokenizers, and compare."""

    @abstractmethod
    def _score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """Score every response; called by one thread at a time."""

    def _divided(
        self, lengths: NDArray[np.int64], budget: int, results_of: Callable[[list[RowNumbers]], Sequence[Result]]
    ) -> list[Result]:
        """Each row's result. The ranks of a sharded model divide the rows, and each gets the results of all.

        Args:
            lengths: [N] tokens of the rows.
            results_of: returns [N] results, of which those of the rows in the given micro-batches count.
        """
        rank, world = self._shard.rank, self._shard.world
        results = results_of(inference_plan(lengths, budget, rank, world, lockstep=not self._shard.is_whole))
        if self._shard.is_whole:
            return list(results)
        from rlhf_ray.engine.distributed import gather_objects

        shares = gather_objects([results[row] for row in rows_of_rank(len(lengths), rank, world)])
        return [result for share in shares for result in share]

    def _check_context(self, requests: Sequence[RewardRequest], lengths: NDArray[np.int64], longest: int | None,
                       counted: str = "tokens") -> None:
        """Refuse rows that are longer than the model's context; they are never truncated.

        Args:
            lengths: [N] tokens of the requests' rows.
            longest: the context; None if the model has no limit.
            counted: what `lengths` counts, for the message.

        Raises:
            SampleError: naming the samples and the context.
        """
        over = np.flatnonzero(lengths > (longest or np.inf))
        if len(over):
            raise SampleError(
                f"{len(over)} samples ({sample_names([requests[i].key for i in over])}) have up to {lengths.max()} "
                f"{counted} by the tokenizer of {self._who}, over its context of {longest}: lower prompts.max_tokens "
                "or generator.sampling.max_tokens, or use a model with a longer context")


class ModelSource(LocalSource[ModelReward]):
    """Scores prompt and response by one label of a sequence classifier."""

    KIND = "reward model"

    def _load(self) -> Mapping[str, float]:
        from rlhf_ray.engine.frozen_model import largest_of, place_of
        from rlhf_ray.models.classifier import Classifier

        self._model: Classifier = Classifier(
            self._config, self._config.label, probability=self._config.value == "probability",
            place=place_of(self._shard))
        self._tokenizer = load_tokenizer(self._config, require_eos=False)
        self._same_ids = (not self._model.is_encoder
                          and tokenizer_digest(self._tokenizer) == tokenizer_digest(load_tokenizer(self._policy)))
        chats = not self._model.is_encoder and self._tokenizer.eos_token_id is not None
        self._ends = TurnEnds.of(self._tokenizer, self._config) if chats else None
        return self._model.compare(self._who, self._rows, self._budget, largest_of(self._shard))

    def _score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        rows = [self._encode(request) for request in requests]
        lengths = np.array([len(row.ids) for row in rows])
        self._check_context(requests, lengths, self._model.longest)
        scores = self._divided(lengths, max(self._budget, int(lengths.max())), partial(self._model.scores, rows))
        return RewardAnswer(finite_scores(
            np.array(scores, dtype=np.float32), requests, self._who,
            "fix the model (a NaN usually means its weights are damaged or its precision too low)."))

    def _encode(self, request: RewardRequest) -> EncodedRow:
        from rlhf_ray.models.classifier import EncodedRow

        # A policy may have more embeddings than its tokenizer has tokens, and sample their ids. They have no text.
        if self._same_ids and request.tokens.max() < self._model.vocabulary:
            return EncodedRow(request.tokens)
        return encode_for(self._model, request, self._tokenizer, self._ends)
