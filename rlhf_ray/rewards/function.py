"""A user's own function as a source: batch in, scores out, in a process that can be killed."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.rewards.answers import finite_scores
from rlhf_ray.rewards.killable import KillableFunction
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest, sample_names

ARGUMENTS = ("prompts", "responses", "labels", "finish_reasons")
"""What a function may take, by keyword: lists with an entry per response. Labels are the prompts' other columns."""


class FunctionSource:
    """Calls `function(prompts=..., responses=..., labels=..., finish_reasons=...)` for each chunk."""

    def __init__(self, name: str, config: FunctionReward) -> None:
        self._who = f"the reward function {config.function!r} (rewards.{name})"
        self._function = KillableFunction(self._who, config.function, ARGUMENTS, config.timeout_s)

    async def start(self) -> None:
        """Import the function. Raises RewardError when that fails or its signature does not fit."""
        await self._function.start()

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer:
        """One score per response.

        Raises:
            RewardError: the function raised, blocked past its deadline, ended its process, or did not give one finite
                number per response; names the samples.
        """
        given = {
            "prompts": [r.prompt for r in requests], "responses": [r.response for r in requests],
            "labels": [r.metadata for r in requests], "finish_reasons": [r.finish_reason for r in requests],
        }
        values = await self._function.call(given, [sample_names([r.key]) for r in requests])
        return RewardAnswer(finite_scores(values, requests, self._who, "fix the function."))

    async def stop(self) -> None:
        """End its process, within a few seconds even while a call hangs."""
        await self._function.stop()
