"""What the open episodes do, for status.json: the driver asks the episode runners every few seconds."""

import asyncio
from contextlib import suppress
from typing import Any

from rlhf_ray.errors import RLHFError
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.workers.calls import Deadline
from rlhf_ray.workers.worker_group import WorkerGroup

EVERY_S = 2.0
SHOWN = 3
"""Episodes that are described, oldest first."""


class EpisodeWatch:
    """Asks all runners for their open episodes.

    Example:
        watch = EpisodeWatch(roles.runners)
        async with background_task("the watch over episodes", watch.run):
            ...
            watch.status()  # {"open": 12, "oldest": ["episode (0, 12, 3), turn 9, tool `search`, 214 s"]}
    """

    def __init__(self, runners: WorkerGroup[EpisodeRunner]) -> None:
        self._runners = runners
        self._open: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Ask once. A runner that does not answer is left out; if it is lost, its other calls notice that."""
        found: list[dict[str, Any]] = []
        for rank in self._runners.ranks:
            with suppress(RLHFError):
                found += await self._runners.call(rank, EpisodeRunner.activity, deadline=Deadline(EVERY_S)).value()
        self._open = sorted(found, key=lambda each: -float(each["age_s"]))

    def status(self) -> dict[str, Any]:
        """Number of open episodes, and the oldest in words."""
        return {"open": len(self._open), "oldest": [in_words(each) for each in self._open[:SHOWN]]}


def in_words(episode: dict[str, Any]) -> str:
    """An open episode, as `EpisodeRunner.activity` gives it: "episode (0, 12, 3), turn 9, tool `search`, 214 s"."""
    key = ", ".join(map(str, episode["key"]))
    return f"episode ({key}), turn {episode['turn']}, {episode['doing']}, {episode['since_s']:.0f} s"
