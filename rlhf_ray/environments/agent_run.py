"""A run of an agent, which has its own loop, and asks the policy while it runs.

Its time passes only while none of its requests is open: what the policy needs is not the agent's. A run whose process
died begins again in a process of its own, once, as the call of an environment is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rlhf_ray.environments.host_process import Answer, Call, HostLost, HostProcess
from rlhf_ray.environments.hosts import Hosts
from rlhf_ray.environments.open_episode import OpenEpisode
from rlhf_ray.environments.protocol import AgentSession

Begin = Callable[[], Awaitable[AgentSession]]
"""Makes a new session for a run that begins."""


class Pace:
    """When an agent has asked and was answered.

    Example:
        pace = Pace()
        pace.begins()
        pace.asks()
        pace.answered()
    """

    def __init__(self) -> None:
        self.open = 0
        """Requests that are not answered yet."""
        self.asked = False
        """It has asked since it began."""
        self.since = 0.0
        """When it began, or was answered last, in the event loop's time."""
        self._changed = asyncio.Event()

    def begins(self) -> None:
        """It begins, perhaps again."""
        self.asked = False
        self.since = asyncio.get_running_loop().time()

    def asks(self) -> None:
        """A request has come."""
        self.open += 1
        self.asked = True
        self._changed.set()

    def answered(self, *, refused: bool = False) -> None:
        """A request is over. One that was refused gives the agent no time."""
        self.open -= 1
        if not refused:
            self.since = asyncio.get_running_loop().time()
        self._changed.set()

    async def wait(self, future: asyncio.Future[Any], reset_s: float, step_s: float) -> bool:
        """Wait for a result as long as the agent may take; returns whether there is one.

        Args:
            reset_s: its time until it asks first.
            step_s: its time without an open request after that.
        """
        while not future.done():
            self._changed.clear()
            left = None
            if not self.open:
                limit = step_s if self.asked else reset_s
                left = self.since + limit - asyncio.get_running_loop().time()
                if left <= 0:
                    return False
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([future, changed], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
        return True


class AgentRun(OpenEpisode):
    """One attempt at an episode by an agent. `close` ends it in any state."""

    KIND = "agent"

    def __init__(self, hosts: Hosts, number: int, pace: Pace) -> None:
        super().__init__(hosts, number)
        self._asked = "run"
        self._pace = pace
        self._left = False
        """Nobody waits for it any more."""

    async def run(self, row: dict[str, Any], begin: Begin) -> Answer:
        """What it returned, as the fields of `Result`.

        Args:
            begin: is called when it begins, and again when its process was lost.

        Raises:
            EpisodeFailed: it raised, returned nonsense, took too long or lost its process.
        """
        while True:
            await self._reopen()
            session = await begin()
            self._pace.begins()
            try:
                answer = await self._ask("run", self._pickled({"row": row, "session": session}))
            except HostLost as lost:
                self._after(lost, "run")
                continue
            self._answered()
            return answer

    async def _bring_back(self) -> None:
        """It begins in any process alike."""

    async def _in_time(self, call: Call, future: asyncio.Future[Answer]) -> bool:
        if call != "run":
            return await super()._in_time(call, future)
        limits = self._hosts.config.timeout_s
        return await self._pace.wait(future, limits.reset, limits.step)

    def _late(self, call: Call) -> tuple[str, str]:
        limits = self._hosts.config.timeout_s
        if call != "run":
            return super()._late(call)
        if self._left:
            return f"had not ended {limits.step:g} s after its episode", "step"
        if self._pace.asked:
            return f"neither asked the policy nor ended within {limits.step:g} s", "step"
        return f"had not asked the policy within {limits.reset:g} s", "reset"

    async def _wait_for_cancelled(self, process: HostProcess, future: asyncio.Future[Answer]) -> None:
        if process.alone:  # what it does is of no use any more, and it has no neighbours
            process.give_up(HostLost("stopped", "was stopped"))
            return
        self._left = True
        await asyncio.wait([future], timeout=self._hosts.config.timeout_s.step)
        if not future.done():
            await self._overdue(process, "run", future)
