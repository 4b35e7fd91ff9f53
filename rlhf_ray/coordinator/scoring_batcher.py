"""Batches of chunks that were generated at nearly the same time: each role scores a batch in one call.

A call costs the coordinator about a millisecond, whatever its size, and several chunks fill a model's forward passes
better than one. A chunk waits for others for a small share of its generation time, so batches form when chunks finish
in quick succession, and no chunk waits long. Timing decides which chunks share a batch, and floating-point sums may
depend on that. The results of synchronous runs must not depend on timing, so they do not batch (their linger is 0).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rlhf_ray.replay.chunk import Chunk

LINGER = 0.02
"""How long a chunk waits for others, as a share of its generation time."""
MAX_BATCH = 8
"""Most chunks in a batch: one worker of each role scores a batch, and its first chunk waits for the last."""


class ScoringBatcher:
    """Scores chunks that are submitted within a short time in one batch.

    Args:
        score: scores a batch and fills its chunks with experience (`Pipeline._score_and_assemble`).
    """

    def __init__(self, score: Callable[[Sequence[Chunk]], Awaitable[None]]) -> None:
        self._score = score
        self._pending: list[tuple[Chunk, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, chunk: Chunk, linger: float) -> None:
        """Wait until the chunk is scored. A batch starts when the first of its chunks has waited for its `linger`
        (seconds), or when it is full; at 0 the chunk is scored alone, at once. An error of `score` is raised for all
        chunks of the batch."""
        if linger <= 0:
            await self._score([chunk])
            return
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[None] = loop.create_future()
        self._pending.append((chunk, scored))
        if len(self._pending) == MAX_BATCH:
            self._start_batch()
        elif self._timer is None or loop.time() + linger < self._timer.when():
            self._start_at(loop.time() + linger)
        await scored

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
        batch = [(chunk, scored) for chunk, scored in self._pending if not scored.done()]
        self._pending = []
        if batch:  # empty if all were cancelled
            task = asyncio.create_task(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Sequence[tuple[Chunk, asyncio.Future[None]]]) -> None:
        failure: Exception | None = None
        try:
            await self._score([chunk for chunk, _ in batch])
        except Exception as error:
            failure = error
        for _, scored in batch:
            if scored.done():  # cancelled
                continue
            if failure is None:
                scored.set_result(None)
            else:
                scored.set_exception(failure)
