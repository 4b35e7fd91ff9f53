"""The frozen reward model: one score per rollout."""

import os
import time

import numpy as np
import torch

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import RewardError
from rlhf_ray.models.loading import load_scalar_model
from rlhf_ray.models.packed_model import PackedScalarModel, last_token_scores
from rlhf_ray.records import Prompts, RewardScores, Rollout
from rlhf_ray.roles.micro_batch import MicroBatch, inference_plan


class RewardScorer:
    """Scores prompt and response at the last token. A score that is not a finite number is an error, never a zero."""

    def __init__(self, model: ModelConfig, micro_batch_tokens: int) -> None:
        self._config = model
        self._budget = micro_batch_tokens

    def start(self) -> dict[str, float]:
        """Load the model. Raises ModelError when there is none, or it has no one-label head."""
        began = time.perf_counter()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model = PackedScalarModel(load_scalar_model(self._config, new_head=False))
        self._model = model.to(self._device).eval().requires_grad_(False)
        return {"pid": os.getpid(), "seconds": time.perf_counter() - began}

    @torch.no_grad()
    def score(self, rollout: Rollout, prompts: Prompts | None = None) -> RewardScores:
        """One float32 score per row.

        Args:
            prompts: the rows that the rollout's keys name, with their metadata; a reward model needs neither.

        Raises:
            RewardError: a score is NaN or infinite; names the samples.
        """
        scores = np.zeros(len(rollout), dtype=np.float32)
        for rows in inference_plan(rollout, self._budget):
            micro = MicroBatch(rollout.select(rows), self._device)
            outputs = self._model(micro.tokens, micro.packing)
            scores[rows] = last_token_scores(outputs, micro.packing).cpu().numpy()
        wrong = np.flatnonzero(~np.isfinite(scores))
        if len(wrong):
            first = (rollout.keys[i] for i in wrong[:3])
            keys = ", ".join(f"epoch {k.epoch} row {k.row} sample {k.sample}" for k in first)
            raise RewardError(f"the reward model {self._config.path!r} gave {scores[wrong[0]]} for {len(wrong)} of "
                              f"{len(rollout)} samples ({keys}). No score is made up in its place: mend the model "
                              "(a NaN usually means its weights are damaged or its precision too low).")
        return RewardScores(scores)
