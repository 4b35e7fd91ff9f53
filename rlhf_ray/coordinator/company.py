"""Chunks that were generated at nearly the same time go on through the roles together: one call a role, not a chunk.

A call costs the coordinator about a millisecond, whatever it carries, and a model's forward passes are better filled by
several chunks. A chunk waits for company a small share of the time that it took to be generated, so company forms
where chunks come fast, and nobody waits long. Which chunks come together is a matter of timing, and sums in floating
point may depend on company: synchronous runs, whose results must not, go without (their patience is 0).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

PATIENCE = 0.02
"""How long a chunk waits for company, as a share of the time since it was begun."""
MOST = 8
"""Chunks of one company: they are scored by one worker of each role, and the first of them waits for the last."""

Member = TypeVar("Member")
Result = TypeVar("Result")


class Companies(Generic[Member, Result]):
    """Lets those who join within each other's patience leave together.

    Args:
        journey: what a company does; gives each member's result, in the members' order.
    """

    def __init__(self, journey: Callable[[Sequence[Member]], Awaitable[Sequence[Result]]]) -> None:
        self._journey = journey
        self._gathered: list[tuple[Member, asyncio.Future[Result]]] = []
        self._leaves: asyncio.TimerHandle | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def join(self, member: Member, patience: float) -> Result:
        """The member's result. A company leaves when the first of its members has waited for its `patience` (seconds),
        or when it is full; at 0 a member leaves at once. What fails the journey is raised for every member."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._gathered.append((member, result))
        if patience <= 0 or len(self._gathered) == MOST:
            self._leave()
        elif self._leaves is None or loop.time() + patience < self._leaves.when():
            self._wait_until(loop.time() + patience)
        return await result

    def close(self) -> None:
        """Drop what is under way."""
        self._wait_until(None)
        self._gathered.clear()
        for task in self._under_way:
            task.cancel()

    def _wait_until(self, moment: float | None) -> None:
        if self._leaves is not None:
            self._leaves.cancel()
        self._leaves = None if moment is None else asyncio.get_running_loop().call_at(moment, self._leave)

    def _leave(self) -> None:
        self._wait_until(None)
        company, self._gathered = [(m, result) for m, result in self._gathered if not result.done()], []
        if company:  # not all of them were dropped
            task = asyncio.create_task(self._go(company))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _go(self, company: Sequence[tuple[Member, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._journey([member for member, _ in company])
        except Exception as error:
            for _, future in company:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(company, results, strict=True):
            if not future.done():
                future.set_result(result)
