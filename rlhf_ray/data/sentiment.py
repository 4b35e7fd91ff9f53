"""Sentiment scores by VADER's rules (Hutto and Gilbert 2014), to evaluate the quickstart independently of its
reward."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@cache
def _analyser() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def judge_scores(texts: list[str]) -> NDArray[np.float32]:
    """[N] float32 compound scores in [-1, 1], one per text; 0 for an empty text. The lexicon is read once a process."""
    analyser = _analyser()
    return np.array([analyser.polarity_scores(text)["compound"] for text in texts], dtype=np.float32)
