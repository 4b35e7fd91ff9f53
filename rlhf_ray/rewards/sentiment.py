"""Sentiment by VADER's rules (Hutto and Gilbert 2014), which evaluates the quickstart independently of its reward: of
texts, and of responses as a reward source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, RewardSource


@cache
def _analyser() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def judge_scores(texts: list[str]) -> NDArray[np.float32]:
    """[N] float32 compound scores in [-1, 1], one per text; 0 for an empty text. The lexicon is read once a process."""
    analyser = _analyser()
    return np.array([analyser.polarity_scores(text)["compound"] for text in texts], dtype=np.float32)


class VaderSource(RewardSource):
    """Reads only the response."""

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """VADER's compound score of each response, in [-1, 1]."""
        return RewardAnswer(judge_scores([request.response for request in requests]))
