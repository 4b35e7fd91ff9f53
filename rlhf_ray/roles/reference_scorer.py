"""The reference scorer: log-probabilities of rollouts under the frozen model that the policy started from."""

import os
import time
from pathlib import Path

import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.models.loading import load_causal_lm
from rlhf_ray.models.packed_model import PackedLanguageModel
from rlhf_ray.models.parity import ParityProbe, RowLimits
from rlhf_ray.records import Rollout, TokenScores, WorkerProfile
from rlhf_ray.roles.micro_batch import concatenated, inference_plan, score_columns
from rlhf_ray.roles.profiling import TorchProfile


class ReferenceScorer:
    """A pure function of rollouts: repeated calls return the same numbers."""

    def __init__(self, model: ModelConfig, micro_batch_tokens: int, temperature: float,
                 longest: int | None = None) -> None:
        """`longest`: maximum tokens of a row; those of a micro-batch if None."""
        self._config = model
        self._budget, self._longest = micro_batch_tokens, longest or micro_batch_tokens
        self._temperature = temperature
        self._profile = TorchProfile()

    def start(self) -> dict[str, float]:
        """Load the model and compare its packed passes with transformers' own; returns pid, seconds and the comparison.

        Raises:
            ModelError: the model cannot be loaded, or packed passes do not compute it.
        """
        began = time.perf_counter()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model = PackedLanguageModel(load_causal_lm(self._config), self._temperature)
        self._model = model.to(self._device).eval().requires_grad_(False)
        limits = RowLimits.of(model.model.config, self._longest, self._budget)
        compared = ParityProbe(model, limits, self._device).check(f"ReferenceScorer of {self._config.path!r}")
        return {"pid": os.getpid(), "seconds": time.perf_counter() - began, **compared}

    @torch.no_grad()
    def logprobs(self, *rollouts: Rollout) -> TokenScores:
        """Log-probabilities of the response tokens at the sampling temperature, zero elsewhere. The rows of all
        rollouts are concatenated and share forward passes."""
        whole = concatenated(rollouts)
        return score_columns(
            whole, inference_plan(whole, self._budget), self._device,
            lambda micro: self._model(
                micro.tokens, micro.packing, micro.predicted, mask=micro.sampling_mask)[:1])[0]

    def begin_profile(self) -> None:
        """Start profiling."""
        self._profile.begin()

    def end_profile(self, trace: str) -> WorkerProfile | None:
        """Write the profile to the file `trace` and return its summary; None if none was recorded."""
        return self._profile.end(Path(trace))

    def drop_profile(self) -> None:
        """Stop profiling and discard the profile."""
        self._profile.drop()
