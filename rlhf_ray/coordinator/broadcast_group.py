"""The same call to all generators, without those that are lost: above all those that receive one publication."""

import asyncio
from collections.abc import Collection, Iterable
from typing import Any, Literal, overload

from rlhf_ray.errors import DamagedBucket, RLHFError, WorkerLost
from rlhf_ray.observability.bottleneck import PUBLISH
from rlhf_ray.roles.generator import Generator
from rlhf_ray.workers.calls import AsyncMethod, Call, Deadline, Method, Result
from rlhf_ray.workers.dispatcher import WorkerDispatcher, finished
from rlhf_ray.workers.health_monitor import Decision


class BroadcastGroup:
    """The receivers of a publication, or of what prepares one. A generator that is lost leaves the group, and the
    others continue."""

    def __init__(self, dispatcher: WorkerDispatcher[Generator], ranks: Iterable[int], phase: str = PUBLISH) -> None:
        """
        Args:
            phase: of the step that their working time counts for.
        """
        self._phase = phase
        self._dispatcher = dispatcher
        self.ranks = list(ranks)
        self.losses: list[WorkerLost] = []
        """Losses of the generators that left, in order."""
        self._next_loss: asyncio.Future[None] | None = None

    @overload
    def calls(self, method: AsyncMethod[Generator, Result], *args: Any, only: Collection[int] | None = None,
              deadline: Deadline | None = None) -> list[Call[Result]]: ...

    @overload
    def calls(self, method: Method[Generator, Result], *args: Any, only: Collection[int] | None = None,
              deadline: Deadline | None = None) -> list[Call[Result]]: ...

    def calls(self, method: Any, *args: Any, only: Collection[int] | None = None,
              deadline: Deadline | None = None) -> list[Call[Any]]:
        """The same call to all of them, or to some."""
        return [self._dispatcher.group.call(rank, method, *args, deadline=deadline)
                for rank in self.ranks if only is None or rank in only]

    async def each(self, calls: list[Call[Result]]) -> list[Result]:
        """Results of the same call to all of them. The first failure is raised."""
        answers = []

        async def get(call: Call[Result]) -> None:
            if await self._answers(call):
                answers.append((call.rank, await call.value()))

        await asyncio.gather(*(get(call) for call in calls))
        return [answer for _, answer in sorted(answers, key=lambda pair: pair[0])]

    async def without(self, calls: list[Call[Any]]) -> dict[int, RLHFError]:
        """Wait for calls; returns the ranks whose argument was lost or arrived damaged, with the errors."""
        missed: dict[int, RLHFError] = {}

        async def wait(call: Call[Any]) -> None:
            try:
                await self._answers(call)
            except DamagedBucket as error:
                missed[call.rank] = error
            except WorkerLost as error:
                if error.kind != "result" or error.role != call.role:
                    raise
                missed[call.rank] = error

        await asyncio.gather(*(wait(call) for call in calls))
        return missed

    async def _answers(self, call: Call[Any]) -> bool:
        """Wait for a call; False if its generator was lost, which leaves the group.

        Raises:
            WorkerLost: an argument of the call is lost.
        """
        try:
            await finished(call, self._phase, self._dispatcher.health.clock)
        except WorkerLost as error:
            if not self._leaves(error):
                raise
            return False
        return True

    def next_loss(self) -> "asyncio.Future[None]":
        """A future that is done when the next generator leaves; there is one at a time."""
        self._next_loss = asyncio.get_running_loop().create_future()
        return self._next_loss

    def give_up_on(self, reason: str, kind: Literal["hung", "broke"] = "hung",
                   only: Collection[int] | None = None) -> None:
        """Give up all remaining generators, or some: their calls of `load_weights` will not end, or failed."""
        for rank in [rank for rank in self.ranks if only is None or rank in only]:
            group = self._dispatcher.group
            self._leaves(WorkerLost(f"{group.role}/{rank} {reason}", group.role, rank, group.incarnation(rank),
                                    "load_weights", kind))

    def _leaves(self, error: WorkerLost) -> bool:
        """Whether the generator of a lost call is being replaced, and left the group."""
        if self._dispatcher.lost(error) is not Decision.RETRY:
            return False
        self.ranks = [rank for rank in self.ranks if rank != error.rank]
        self.losses.append(error)
        if self._next_loss is not None and not self._next_loss.done():
            self._next_loss.set_result(None)
        return True
