"""VADER's sentiment of responses as a reward source."""

from collections.abc import Sequence

from rlhf_ray.data.sentiment import judge_scores
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest


class VaderSource:
    """Reads only the response. See `protocol.RewardSource`."""

    async def start(self) -> None:
        """Nothing to load."""

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """VADER's compound score of each response, in [-1, 1]."""
        return RewardAnswer(judge_scores([request.response for request in requests]))

    async def stop(self) -> None:
        """Nothing to release."""
