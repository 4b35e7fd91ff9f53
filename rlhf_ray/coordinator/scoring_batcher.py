"""Batches of chunks that were generated at nearly the same time: each role scores a batch in one call.

A call costs the coordinator about a millisecond, whatever its size, and several chunks fill a model's forward passes
better than one. A chunk waits for others for a small share of its generation time, so batches form when chunks finish
in quick succession, and no chunk waits long. Timing decides which chunks share a batch, and floating-point sums may
depend on that. The results of synchronous runs must not depend on timing, so they do not batch (their linger is 0).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

LINGER = 0.02
"""How long a chunk waits for others, as a share of its generation time."""
MAX_BATCH = 8
"""Most chunks in a batch: one worker of each role scores a batch, and its first chunk waits for the last."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class ScoringBatcher(Generic[Item, Result]):
    """Scores items that are submitted within a short time in one batch.

    Args:
        score: scores a batch; returns each item's result, in the items' order.
    """

    def __init__(self, score: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._score = score
        self._pending: list[tuple[Item, asyncio.Future[Result]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, item: Item, linger: float) -> Result:
        """The item's result. A batch starts when the first of its items has waited for its `linger` (seconds), or when
        it is full; at 0 the item is scored alone, at once. An error of `score` is raised for all items of the batch."""
        if linger <= 0:
            (alone,) = await self._score([item])
            return alone
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._pending.append((item, result))
        if len(self._pending) == MAX_BATCH:
            self._start_batch()
        elif self._timer is None or loop.time() + linger < self._timer.when():
            self._start_at(loop.time() + linger)
        return await result

    def close(self) -> None:
        """Drop what is pending and under way."""
        self._start_at(None)
        self._pending.clear()
        for task in self._tasks:
            task.cancel()

    def _start_at(self, moment: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if moment is None else asyncio.get_running_loop().call_at(moment, self._start_batch)

    def _start_batch(self) -> None:
        self._start_at(None)
        batch, self._pending = [(item, result) for item, result in self._pending if not result.done()], []
        if batch:  # empty if all were cancelled
            task = asyncio.create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._score([item for item, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)
