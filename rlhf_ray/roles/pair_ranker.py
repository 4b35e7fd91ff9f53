"""Builds preference data: ranks two responses to the same prompt by a judge."""

from typing import Any

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.sentiment import judge_scores
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Rollout
from rlhf_ray.rewards.protocol import finished, rollout_texts


class PairRanker:
    """Ranks pairs of responses. Keeps no state between calls."""

    def __init__(self, model: ModelConfig, min_margin: float) -> None:
        self._model, self._min_margin = model, min_margin

    def start(self) -> None:
        """Load the tokenizer."""
        self._tokenizer = load_tokenizer(self._model)

    def rank(self, rollout: Rollout) -> list[dict[str, Any] | None]:
        """A preference row for each pair of adjacent samples of the rollout; None if the judge's scores differ by less
        than the minimum margin."""
        prompts, responses = rollout_texts(self._tokenizer, rollout, len(rollout.keys))
        scores, ended = judge_scores(responses), finished(rollout)
        rows: list[dict[str, Any] | None] = []
        for i in range(0, len(responses), 2):
            better, worse = (i, i + 1) if scores[i] >= scores[i + 1] else (i + 1, i)
            margin = float(scores[better] - scores[worse])
            rows.append(None if margin < self._min_margin else {
                "prompt": prompts[i], "chosen": responses[better], "rejected": responses[worse],
                "chosen_finished": bool(ended[better]), "rejected_finished": bool(ended[worse]), "margin": margin,
            })
        return rows
