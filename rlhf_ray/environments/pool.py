"""The environments of one name in one runner: episodes are opened in processes that can be killed. The runner opens at
most `concurrency` at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from itertools import count
from typing import Any

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.agent_run import AgentRun, Begin, Pace
from rlhf_ray.environments.host_process import Answer
from rlhf_ray.environments.hosts import EnvironmentFacts, Hosts
from rlhf_ray.environments.open_episode import OpenEpisode, Played
from rlhf_ray.environments.protocol import Reply, Start, Step


class EnvironmentPool:
    """The environments of one name in one runner. Used from one event loop.

    Example:
        >>> pool = EnvironmentPool("tools", config)
        >>> facts = await pool.start()
        >>> environment = await pool.open({"question": "6 * 7"}, seed=0)
        >>> step = await environment.step(reply)
        >>> await environment.close()
        >>> await pool.stop()
    """

    def __init__(self, name: str, config: EnvironmentConfig) -> None:
        self._hosts = Hosts(name, config)
        self._numbers = count()

    async def start(self) -> EnvironmentFacts:
        """Load the user's code in a process.

        Raises:
            EnvironmentFailed: it cannot be loaded, or has none of the known shapes.
        """
        return await self._hosts.start()

    async def open(self, row: dict[str, Any], seed: int, played: Played | None = None) -> OpenEnvironment:
        """Begin an episode, or bring back one that another process has played: from its snapshot, if its class has
        `restore`; else by a reset and the same replies, whose answers must be the same.

        Args:
            row: the columns of the prompt's row.
            seed: of the environment. Python's and numpy's global generators are not seeded, since the episodes of a
                process share them.
            played: what the other process has played.

        Raises:
            EpisodeFailed: the environment raised, answered nonsense, took too long or lost its process.
            ReplayDiverged: it cannot be brought back: it is not replayable and has no snapshot, or it answers
                differently.
        """
        assert self.facts.shape != "agent", "an agent is run"
        episode = OpenEpisode(self._hosts, next(self._numbers))
        try:
            start = await episode.open(row, seed, played)
        except BaseException:
            self._close(episode)
            raise
        ended = played is not None and bool(played.steps) and _ends(played.steps[-1][1])
        return OpenEnvironment(episode, start, ended, self._close)

    async def run(self, row: dict[str, Any], begin: Begin, pace: Pace) -> Answer:
        """Run an agent to its end; returns the fields of `Result`. When this is cancelled, it returns at once, and an
        agent that does not end by itself is killed in the background.

        Args:
            row: the columns of the prompt's row.
            begin: see `AgentRun.run`.
            pace: of its requests.

        Raises:
            EpisodeFailed: the agent raised, returned nonsense, took too long or lost its process.
        """
        run = AgentRun(self._hosts, next(self._numbers), pace)
        left_running = False
        try:
            return await run.run(row, begin)
        except asyncio.CancelledError:
            left_running = True
            raise
        finally:
            closing = self._close(run)
            if not left_running:
                await asyncio.wait([closing])

    @property
    def facts(self) -> EnvironmentFacts:
        """What is known of it since the start."""
        assert self._hosts.facts is not None, "the pool is not started"
        return self._hosts.facts

    def printed(self) -> list[str]:
        """The lines that the user's code has printed since the last call, each with the environment's name. At most
        1 MiB is kept between two calls, and of what a process prints between two requests."""
        return self._hosts.printed.take()

    async def stop(self) -> None:
        """End all processes, within a few seconds in any state. What is open fails."""
        await self._hosts.stop()

    def _close(self, episode: OpenEpisode) -> asyncio.Task[None]:
        """Close an episode in the background."""
        return self._hosts.spawn(episode.close())


def _ends(answer: Answer) -> bool:
    """Whether an answer to a step ends the episode."""
    return bool(answer["done"] or answer["truncated"])


class OpenEnvironment:
    """An episode's environment, between its start and its close. One that is dropped closes itself."""

    def __init__(self, episode: OpenEpisode, start: Answer, ended: bool, close: Any) -> None:
        self.start = Start(messages=start["messages"], tools=start["tools"])
        """How the episode begins."""
        self.observation: str = start["observation"]
        """The text that `reset` of a class with tools returned, or `Start.observation`: it is read after the row's
        prompt, in the same message; "" for none."""
        self._episode = episode
        self._close = close
        self._closing: asyncio.Task[None] | None = None
        self._done = ended
        self._loop = asyncio.get_running_loop()

    @property
    def interrupted(self) -> int:
        """How often it was opened again because its process was lost through no fault of its own."""
        return self._episode.interrupted

    @property
    def snapshot(self) -> Any:
        """Its state after the newest answer, which JSON holds; None if its class has no `snapshot`."""
        return self._episode.snapshot

    async def step(self, reply: Reply) -> Step:
        """How the environment answers a turn.

        Raises:
            EpisodeFailed: it raised, answered nonsense, took too long or lost its process; it is closed then.
            ReplayDiverged: it lost its process, and cannot be brought back.
        """
        assert not self._done, "the episode is done; it takes no more steps"
        answer = await self._checked(self._episode.step(reply))
        self._done = _ends(answer)
        return Step(**answer)

    async def reward(self) -> float:
        """`get_reward()` of a class that has it, 0.0 for others. Raises as `step`."""
        return float(await self._checked(self._episode.reward()))

    async def close(self) -> None:
        """Close it. Does not raise; an environment that hangs there is killed. While a call is under way whose caller
        was cancelled, it returns at once, and the environment is closed when that call has ended."""
        left_running = self._episode.busy and self._episode.call is None
        closing = self._begin_close()
        if not left_running:
            await asyncio.wait([closing])

    async def _checked(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            assert self._closing is None, "the environment is closed"
            return await call
        except BaseException:
            call.close()
            self._begin_close()
            raise

    def _begin_close(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = self._close(self._episode)
        return self._closing

    def __del__(self) -> None:
        if getattr(self, "_closing", self) is None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._close, self._episode)
