"""The rewards of an episode's environment as a component of the score."""

from collections.abc import Sequence

import numpy as np

from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, RewardSource


class EnvironmentSource(RewardSource):
    """The sum of the rewards of all turns, each on the last token that the policy sampled in it."""

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """One score per episode.

        Raises:
            ValueError: a request is no episode.
        """
        columns = []
        for request in requests:
            if request.episode is None:
                raise ValueError("a single response has no environment, which could give a reward")
            column = np.zeros(len(request.tokens), dtype=np.float32)
            for turn, end in zip(request.episode.turns, request.turn_ends, strict=True):
                column[end] += turn.reward
            columns.append(column)
        scores = np.array([column.sum() for column in columns], dtype=np.float32)
        return RewardAnswer(scores, np.concatenate(columns))
