"""Shows in the run's console what reward functions and environments print in their workers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from rlhf_ray.config.derived import reward_sections
from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import RLHFError
from rlhf_ray.observability.background_task import background_task
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup

EVERY_S = 1.0
LAST_S = 3.0
"""Longest time for what was printed last, such as before an error."""


class Printing(NamedTuple):
    """Workers that run code of the user."""

    workers: WorkerGroup[Any]
    printed: Callable[..., Any]
    """Method of their role: the lines that the code has printed since the last call."""


def printing_roles(config: PPOConfig, roles: RoleGroups) -> list[Printing]:
    """The workers of a run that run code of the user."""
    found = []
    if any(isinstance(reward, FunctionReward) for reward in reward_sections(config).values()):
        found.append(Printing(roles.reward, RewardScorer.printed))
    if roles.runners is not None:
        found.append(Printing(roles.runners, EpisodeRunner.printed))
    return found


@asynccontextmanager
async def prints_shown(printing: Sequence[Printing], say: Callable[[str], None]) -> AsyncIterator[None]:
    """Show what code of the user prints during the enclosed work, and at its end what is left.

    Args:
        say: shows a line.
    """
    if not printing:
        yield
        return

    async def show() -> None:
        for workers, printed in printing:
            for rank in workers.ranks:
                with suppress(RLHFError):  # a lost worker is reported and replaced elsewhere
                    for line in await workers.call(rank, printed).value():
                        say(line)

    async def show_always() -> None:
        while True:
            await show()
            await asyncio.sleep(EVERY_S)

    async with background_task("the output of the user's code", show_always):
        try:
            yield
        finally:
            with suppress(Exception):  # the run may end because its workers, or the cluster, are gone
                async with asyncio.timeout(LAST_S):
                    await show()
