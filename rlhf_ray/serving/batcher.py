"""Batches samples of concurrent requests into forward passes by a token budget.

The batcher decides when a pass starts; the model computes it. One pass runs at a time, in a separate thread. While it
runs, the next batch accumulates; `linger_s` only matters when the model is idle.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rlhf_ray.models.classifier import EncodedRow

LONGEST_RETRY_AFTER_S = 60


class QueueFullError(Exception):
    """Too many samples are queued. `retry_after` is the expected wait in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} samples are queued already; try again in {retry_after} s")
        self.retry_after = retry_after


class TooManyRowsError(Exception):
    """One request has more samples than the queue can ever hold."""


@dataclass
class _Request:
    """The scores of one request so far."""

    scores: NDArray[np.float32]
    missing: int
    arrived: float
    done: asyncio.Future[NDArray[np.float32]]


@dataclass(frozen=True)
class _Waiting:
    """One sample in the queue."""

    request: _Request
    index: int
    row: "EncodedRow"


class Batcher:
    """Scores rows of concurrent callers together, first come, first served.

    Args:
        forward: [N] scores of N rows; called in one thread.
        max_tokens: bound of `rows x longest row` of one pass, the size that attention computes.
        linger_s: how long the first row waits for others.
        max_waiting: maximum number of queued rows.
    """

    def __init__(self, forward: Callable[[Sequence["EncodedRow"]], NDArray[np.float32]], max_tokens: int,
                 linger_s: float, max_waiting: int) -> None:
        self._forward, self._max_tokens = forward, max_tokens
        self._linger_s, self._max_waiting = linger_s, max_waiting
        self._queue: deque[_Waiting] = deque()
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._seconds_per_row = 0.0
        self.samples = 0
        """Rows scored so far."""
        self.forward_passes = 0
        """Passes so far."""

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._queue)

    async def score(self, rows: Sequence["EncodedRow"]) -> NDArray[np.float32]:
        """[N] scores of N rows. If the caller is cancelled, its rows are removed from the queue.

        Raises:
            QueueFullError: the rows do not fit into the queue now.
            TooManyRowsError: they can never fit.
        """
        if len(rows) > self._max_waiting:
            raise TooManyRowsError(f"{len(rows)} samples in one request; the service accepts up to {self._max_waiting}")
        if self.waiting + len(rows) > self._max_waiting:
            raise QueueFullError(self.waiting, self._time_to_room(len(rows)))
        done = asyncio.get_running_loop().create_future()
        request = _Request(np.empty(len(rows), np.float32), len(rows), time.monotonic(), done)
        self._queue.extend(_Waiting(request, i, row) for i, row in enumerate(rows))
        self._arrival.set()
        try:
            return await done
        finally:
            if request.missing:
                self._queue = deque(w for w in self._queue if w.request is not request)

    async def run(self) -> None:
        """Score queued rows until cancelled. A pass that fails only fails its own requests."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._gather()
                batch = self._take()
                if not batch:  # their callers were cancelled while they lingered
                    continue
                began = time.monotonic()
                try:
                    scores = await loop.run_in_executor(self._thread, self._forward, [w.row for w in batch])
                except Exception as error:
                    _fail(batch, error)
                    continue
                self._seconds_per_row = (time.monotonic() - began) / len(batch)
                self.forward_passes += 1
                self.samples += len(batch)
                _deliver(batch, scores)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _gather(self) -> None:
        """Wait for a first row, then for others until the budget is full or `linger_s` has passed."""
        while not self._queue:
            self._arrival.clear()
            await self._arrival.wait()
        until = self._queue[0].request.arrived + self._linger_s
        while self._fitting() == self.waiting and (left := until - time.monotonic()) > 0:
            self._arrival.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), left)

    def _take(self) -> list[_Waiting]:
        return [self._queue.popleft() for _ in range(self._fitting())]

    def _fitting(self) -> int:
        """Number of rows at the head of the queue that fit into one pass."""
        longest = 0
        for count, waiting in enumerate(self._queue):
            longest = max(longest, len(waiting.row.ids))
            if count and longest * (count + 1) > self._max_tokens:
                return count
        return self.waiting

    def _time_to_room(self, rows: int) -> int:
        """Seconds, rounded up, until `rows` more fit, at the speed of the last pass."""
        excess = self.waiting + rows - self._max_waiting
        return min(max(1, math.ceil(excess * self._seconds_per_row)), LONGEST_RETRY_AFTER_S)


def _deliver(batch: Sequence[_Waiting], scores: NDArray[np.float32]) -> None:
    for waiting, score in zip(batch, scores, strict=True):
        request = waiting.request
        request.scores[waiting.index] = score
        request.missing -= 1
        if not request.missing and not request.done.done():
            request.done.set_result(request.scores)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for request in {id(w.request): w.request for w in batch}.values():
        if not request.done.done():
            request.done.set_exception(error)
