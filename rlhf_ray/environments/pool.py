"""The environments of one name in one runner: episodes are opened in processes that can be killed, at most
`concurrency` at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.environments.host_process import Answer, Call
from rlhf_ray.environments.hosts import EnvironmentFacts, Hosts
from rlhf_ray.environments.protocol import Reply, Start, Step
from rlhf_ray.environments.session import Session
from rlhf_ray.errors import EpisodeFailed


@dataclass(frozen=True)
class Waiting:
    """A call of user code that is under way."""

    environment: OpenEnvironment | None
    """None in a reset, which precedes it."""
    call: Call
    tool: str
    """The tool that runs now; "" if none does."""
    since: float
    """When the call began, in the event loop's time."""


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
        self._name, self._config = name, config
        self._hosts = Hosts(name, config)
        self._places = asyncio.Semaphore(config.concurrency)
        self._numbers = count()
        self._open: dict[Session, weakref.ref[OpenEnvironment] | None] = {}

    async def start(self) -> EnvironmentFacts:
        """Load the user's code in a process.

        Raises:
            EnvironmentFailed: it cannot be loaded, or has none of the known shapes.
        """
        return await self._hosts.start()

    async def open(self, row: dict[str, Any], seed: int, deadline: float | None = None) -> OpenEnvironment:
        """Begin an episode. Waits while `concurrency` are open.

        Args:
            row: the columns of the prompt's row.
            seed: of the environment. Python's and numpy's global generators are not seeded, since the episodes of a
                process share them.
            deadline: of the wait for a free place, in the event loop's time.

        Raises:
            EpisodeFailed: the environment raised, answered nonsense, took too long or lost its process, or no place
                became free until the deadline.
        """
        assert self._hosts.facts is not None, "the pool is not started"
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
        except TimeoutError:
            raise EpisodeFailed("error_timeout", f"{self._hosts.who}: none of its {self._config.concurrency} places "
                                "became free until the episode's deadline. Raise "
                                f"environments.{self._name}.concurrency") from None
        session = Session(self._hosts, next(self._numbers))
        self._open[session] = None
        try:
            start = await session.open(row, seed)
            environment = OpenEnvironment(session, start, self._close)
        except BaseException:
            self._close(session)
            raise
        self._open[session] = weakref.ref(environment)
        return environment

    def printed(self) -> list[str]:
        """The lines that the user's code has printed since the last call, each with the environment's name. At most
        1 MiB is kept between two calls, and of what a process prints between two requests."""
        return self._hosts.printed.take()

    def waiting(self) -> list[Waiting]:
        """The calls of user code that are under way, the longest first."""
        found = [Waiting(handle() if handle else None, session.call, session.tool, session.since)
                 for session, handle in self._open.items() if session.call is not None]
        return sorted(found, key=lambda each: each.since)

    async def stop(self) -> None:
        """End all processes, within a few seconds in any state. What is open fails."""
        self._hosts.stopped = True
        self._places.release()  # whoever waits for a place is told, one after the other
        await self._hosts.stop()

    def _close(self, session: Session) -> asyncio.Task[None]:
        """Close an episode in the background, and give its place back."""
        return self._hosts.spawn(self._closed(session))

    async def _closed(self, session: Session) -> None:
        try:
            await session.close()
        finally:
            del self._open[session]
            self._places.release()


class OpenEnvironment:
    """An episode's environment, between its start and its close. One that is dropped closes itself."""

    def __init__(self, session: Session, start: Answer, close: Any) -> None:
        self.start = Start(messages=start["messages"], tools=start["tools"])
        """How the episode begins."""
        self.observation: str = start["observation"]
        """The text that `reset` of a class with tools returned: it is read after the row's prompt, in the same
        message; "" for none."""
        self._session = session
        self._close = close
        self._closing: asyncio.Task[None] | None = None
        self._done = False
        self._loop = asyncio.get_running_loop()

    @property
    def interrupted(self) -> int:
        """How often it was opened again because its process was lost through no fault of its own."""
        return self._session.interrupted

    async def step(self, reply: Reply) -> Step:
        """How the environment answers a turn.

        Raises:
            EpisodeFailed: it raised, answered nonsense, took too long or lost its process; it is closed then.
            ReplayDiverged: it lost its process through another episode, and cannot be brought back.
        """
        assert not self._done, "the episode is done; it takes no more steps"
        step = Step(**await self._checked(self._session.step(reply)))
        self._done = step.done or step.truncated
        return step

    async def reward(self) -> float:
        """`get_reward()` of a class with tools, 0.0 for the other shapes. Raises as `step`."""
        return float(await self._checked(self._session.reward()))

    async def close(self) -> None:
        """Close it. Does not raise; an environment that hangs there is killed. While a call is under way whose caller
        was cancelled, it returns at once, and the environment is closed when that call has ended."""
        left_running = self._session.busy and self._session.call is None
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
            self._closing = self._close(self._session)
        return self._closing

    def __del__(self) -> None:
        if getattr(self, "_closing", self) is None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._close, self._session)
