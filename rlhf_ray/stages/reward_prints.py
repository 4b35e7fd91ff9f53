"""Shows in the run's console what reward functions print in their workers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from rlhf_ray.config.rewards import FunctionReward, RewardConfig
from rlhf_ray.errors import RLHFError
from rlhf_ray.observability.background_task import background_task
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.workers.worker_group import WorkerGroup

EVERY_S = 1.0
LAST_S = 3.0
"""Longest time for what was printed last, such as before an error."""


@asynccontextmanager
async def prints_shown(rewards: Iterable[RewardConfig], scorers: WorkerGroup[Any],
                       say: Callable[[str], None]) -> AsyncIterator[None]:
    """Show what functions print during the enclosed work, and at its end what is left.

    Args:
        scorers: workers whose role has a method `printed`.
        say: shows a line.
    """
    if not any(isinstance(reward, FunctionReward) for reward in rewards):
        yield
        return

    async def show() -> None:
        for rank in scorers.ranks:
            with suppress(RLHFError):  # a lost worker is reported and replaced elsewhere
                for line in await scorers.call(rank, RewardScorer.printed).value():
                    say(line)

    async def show_always() -> None:
        while True:
            await show()
            await asyncio.sleep(EVERY_S)

    async with background_task("the output of reward functions", show_always):
        try:
            yield
        finally:
            with suppress(Exception):  # the run may end because its workers, or the cluster, are gone
                async with asyncio.timeout(LAST_S):
                    await show()
