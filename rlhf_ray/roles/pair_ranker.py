"""Builds preference data: ranks two responses to the same prompt by a judge."""

from collections.abc import Mapping
from typing import Any

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import RewardConfig
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import Prompts, Rollout
from rlhf_ray.rewards.protocol import finished, requests_of
from rlhf_ray.rewards.sources import make_sources


class PairRanker:
    """Ranks pairs of responses. Keeps no state between calls.

    Args:
        judge: the judge's reward components.
        longest: most tokens of a prompt with its response.
    """

    def __init__(
        self, model: ModelConfig, judge: Mapping[str, RewardConfig], min_margin: float, longest: int
    ) -> None:
        self._model, self._min_margin = model, min_margin
        self._judge = make_sources(judge, model, longest=longest)

    async def start(self) -> None:
        """Load the tokenizer and start the judge.

        Raises:
            ModelError, RewardError: the judge cannot work.
        """
        self._tokenizer = load_tokenizer(self._model)
        await self._judge.start()

    async def rank(self, rollout: Rollout, rows: Prompts) -> list[dict[str, Any] | None]:
        """A preference row for each pair of adjacent samples of the rollout; None if the judge's scores are equal, or
        differ by less than the minimum margin. Its prompt is the one that was sampled from: messages, or the text.

        Args:
            rows: the prompts of the rollout's samples.

        Raises:
            RewardError: the judge has no score for a response.
        """
        requests = requests_of(rollout, rows, self._tokenizer)
        scores = (await self._judge.score(requests)).scores
        ended = finished(rollout)
        pairs: list[dict[str, Any] | None] = []
        for i in range(0, len(requests), 2):
            better, worse = (i, i + 1) if scores[i] >= scores[i + 1] else (i + 1, i)
            margin = float(scores[better] - scores[worse])
            pairs.append(None if margin < self._min_margin or not margin else {
                "prompt": requests[i].messages or requests[i].prompt,
                "chosen": requests[better].text(keep_special_tokens=True),
                "rejected": requests[worse].text(keep_special_tokens=True),
                "chosen_finished": bool(ended[better]), "rejected_finished": bool(ended[worse]), "margin": margin,
            })
        return pairs

    async def printed(self) -> list[str]:
        """The lines that the judge's functions have printed since the last call."""
        return self._judge.printed()

    async def stop(self) -> None:
        """Stop the judge."""
        await self._judge.stop()
