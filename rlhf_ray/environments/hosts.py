"""The processes of one environment in one runner: started when they are needed, the least loaded first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.host_process import HostLost, HostProcess
from rlhf_ray.user_code.process import PrintedLines


@dataclass(frozen=True)
class EnvironmentFacts:
    """What is known of an environment once its code is loaded."""

    shape: Literal["tools", "class", "environment", "agent"]
    tools: list[dict[str, Any]]
    """JSON schemas of the tools that are known before the first reset."""
    replayable: bool
    """The same actions are answered alike."""
    place: str
    """File, line and code of its first line."""
    columns: list[str]
    """Columns of the row that `reset` of a class with tools, or the program of an agent, requires."""
    restorable: bool = False
    """It has `snapshot()` and `restore(snapshot)`."""


class Hosts:
    """The processes of one environment. Used from one event loop."""

    def __init__(self, name: str, config: EnvironmentConfig) -> None:
        self.name, self.config = name, config
        self.who = f"the environment {config.label} (environments.{name})"
        """The environment as the subject of messages."""
        self.printed = PrintedLines(f"environments.{name}", self.who)
        """What it prints."""
        self.facts: EnvironmentFacts | None = None
        """Known after the start."""
        self.stopped = False
        self.turns = asyncio.Semaphore(config.processes)
        """Of the episodes whose call may be to blame for the loss of a process: so many at a time have a process of
        their own, as one loss may have interrupted hundreds of calls."""
        self._processes: set[HostProcess] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> EnvironmentFacts:
        """Load the user's code in a first process. Raises EnvironmentFailed."""
        if self.facts is None:
            self.facts = EnvironmentFacts(**await asyncio.shield(self._new().ready))
            if self.facts.shape == "agent":
                self.who = self.printed.who = f"the agent {self.config.label} (environments.{self.name})"
        return self.facts

    def enter(self, number: int, alone: bool) -> HostProcess:
        """The process for an episode: the least loaded, or a new one.

        Args:
            number: of the episode.
            alone: no other episode may be in it.
        """
        alone = alone or self.config.own_process
        shared = [each for each in self._processes if not each.alone]
        process = min(shared, key=lambda each: len(each.episodes), default=None)
        if process is None or (process.episodes and (alone or len(shared) < self.config.processes)):
            process = self._new()
        process.alone = alone
        process.episodes.add(number)
        return process

    def leave(self, process: HostProcess, number: int) -> None:
        """An episode is closed, or goes on elsewhere. A process that is not needed any more ends."""
        process.episodes.discard(number)
        process.tools.pop(number, None)
        if not process.episodes and process.lost is None:
            process.alone = False
            if self.config.own_process or len(self._processes) > self.config.processes:
                process.give_up(HostLost("stopped", "is not needed"))

    async def stop(self) -> None:
        """End all processes, within a few seconds in any state."""
        self.stopped = True
        for process in list(self._processes):
            process.give_up(HostLost("stopped", "was stopped"))
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run in the background; `stop` waits for it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits it gets it

    def _new(self) -> HostProcess:
        setup = {"source": self.config.source, "memory_mib": self.config.memory_mib,
                 "schemas": self.facts.tools if self.facts else None}
        process = HostProcess(self.who, f"environments.{self.name}", self.printed, setup, self.spawn,
                              self._processes.discard)
        self._processes.add(process)
        return process
