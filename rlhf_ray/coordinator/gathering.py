"""Chunks that wait for the same frozen model, put into one call, so that its forward passes are filled.

The worker cuts what it is given by its own token budget (`micro_batch_tokens`). While it works, what comes gathers by
itself; the linger matters only to a chunk that finds a worker idle. Which chunks come together is a matter of timing,
and sums in floating point may depend on company: synchronous runs, whose results must not, do without.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.coordinator.team import Team

LINGER_S = 0.005
MOST = 16
"""Chunks of one call: a longer one would keep the first of them waiting."""


@dataclass(frozen=True)
class Answer:
    """The reference to what a model said about one chunk."""

    ref: Any


class Gathering:
    """One method of a group whose workers all answer alike; it takes any number of records and answers each."""

    def __init__(self, team: Team, group: WorkerGroup, method: str, phase: str) -> None:
        self._team, self._group, self._method, self._phase = team, group, method, phase
        self._idle = list(range(len(group)))
        self._waiting: deque[tuple[Any, asyncio.Future[Answer]]] = deque()
        self._serving: set[asyncio.Task[None]] = set()
        self._lingering = 0

    async def ask(self, ref: Any) -> Answer:
        """The model's answer about one record, in company if there is some; the call's failure is raised."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((ref, answer))
        self._serve_on()
        return await answer

    def _serve_on(self) -> None:
        """Let an idle worker serve those who wait, unless as many are about to."""
        if self._idle and len(self._waiting) > self._lingering:
            self._lingering += 1
            task = asyncio.create_task(self._serve(self._idle.pop(0)))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, rank: int) -> None:
        await asyncio.sleep(LINGER_S)
        share = -(-len(self._waiting) // self._lingering)  # with the others that are about to
        self._lingering -= 1
        asked = [self._waiting.popleft() for _ in range(min(MOST, share))]
        try:
            if asked:
                await self._call(rank, asked)
        except Exception as error:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)
        finally:
            self._idle.append(rank)
            self._serve_on()

    async def _call(self, rank: int, asked: list[tuple[Any, asyncio.Future[Answer]]]) -> None:
        call = self._group.call(rank, self._method, *(ref for ref, _ in asked), outputs=len(asked))
        await self._team.done(call, self._phase)
        for (_, answer), ref in zip(asked, call.refs, strict=True):
            if not answer.done():  # its chunk was dropped
                answer.set_result(Answer(ref))
