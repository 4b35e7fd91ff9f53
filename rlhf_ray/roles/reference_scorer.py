"""The reference scorer: log-probabilities of rollouts under a frozen model, usually the one that the policy started
from."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_ray.config.derived import Derived
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.batching import inference_plan
from rlhf_ray.engine import distributed
from rlhf_ray.engine.frozen_model import largest_of, place_of
from rlhf_ray.models.loading import load_causal_lm
from rlhf_ray.models.packed_model import CHUNKS, Chunks, PackedLanguageModel
from rlhf_ray.models.parity import ParityProbe, RowLimits
from rlhf_ray.models.shard import WHOLE, Shard
from rlhf_ray.records import Rollout, TokenScores
from rlhf_ray.roles.micro_batch import concatenated, score_columns, share_of
from rlhf_ray.roles.profiling import ProfiledByTorch


class ReferenceScorer(ProfiledByTorch):
    """A pure function of rollouts: repeated calls return the same numbers."""

    def __init__(self, model: ModelConfig, micro_batch_tokens: int, temperature: float,
                 longest: int | None = None, shard: Shard = WHOLE) -> None:
        """
        Args:
            longest: maximum tokens of a row; those of a micro-batch if None.
            shard: the part of the model in this process. The ranks of a model make every call together.
        """
        self._config = model
        self._shard = shard
        self._budget = micro_batch_tokens
        self._longest = longest or micro_batch_tokens
        self._temperature = temperature

    @staticmethod
    def arguments(config: PPOConfig, derived: Derived, rank: int) -> Mapping[str, Any]:
        """Arguments of a rank in a run."""
        return {
            "model": derived.reference_model,
            "micro_batch_tokens": config.reference.micro_batch_tokens,
            "temperature": config.generator.sampling.temperature,
            "longest": derived.longest_sample,
            "shard": Shard.of_worker(rank, config.reference.shards),
        }

    def start(self, address: str = "", timeout_s: float = 0.0) -> dict[str, float]:
        """Load the model and compare its packed passes with transformers' own; returns the comparison.

        Args:
            address: where the ranks of a sharded model join.
            timeout_s: longest wait of any of its collective calls for the other ranks, in seconds.

        Raises:
            ModelError: the model cannot be loaded, or packed passes do not compute it.
        """
        shard = self._shard
        if not shard.is_whole:
            distributed.join(address, shard.rank, shard.world, timeout_s)
        # In lockstep each call of the head is a collective call, see `Learner.chunks`.
        chunks = CHUNKS if shard.is_whole else Chunks(most_tokens=self._budget)
        self._model = model = PackedLanguageModel(load_causal_lm(self._config), self._temperature, chunks)
        self._device = place_of(shard)(model)
        limits = RowLimits.of(model.model.config, self._longest, self._budget)
        return ParityProbe(model, limits, self._device, largest=largest_of(shard)).check(
            f"ReferenceScorer of {self._config.path!r}")

    @torch.no_grad()
    def logprobs(self, rollouts: Sequence[Rollout]) -> TokenScores:
        """Log-probabilities of the response tokens at the sampling temperature, zero elsewhere. The rows of all
        rollouts are concatenated and share forward passes, and the ranks of a sharded model divide them."""
        rows = concatenated(rollouts)
        shard = self._shard
        plan = inference_plan(rows.lengths, self._budget, shard.rank, shard.world, lockstep=not shard.is_whole)
        (scores,) = score_columns(rows, plan, self._device, lambda micro: self._model(
            micro.tokens, micro.packing, micro.predicted, mask=micro.sampling_mask)[:1])
        if shard.is_whole:
            return scores
        return TokenScores.concat(distributed.gather_objects(share_of(scores, shard.rank, shard.world)))
