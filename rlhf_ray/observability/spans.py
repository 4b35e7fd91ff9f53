"""When each worker was busy: spans of work by role and worker, and a window of time by busy workers.

Times are seconds of the coordinator's monotonic clock (`time.monotonic`). Processes of one Linux host share that clock;
hosts do not. A call on another host is placed by the time at which its answer arrived (`add_returned`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Span(NamedTuple):
    """Work of one worker from `start` to `end`, in seconds of the monotonic clock."""

    role: str
    worker: int
    start: float
    end: float


class Task(NamedTuple):
    """A call whose answer is awaited."""

    role: str
    worker: int
    phase: str
    since: float
    """Time of the call, in seconds of the monotonic clock."""


class StepClock:
    """Collects spans of work."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        """The clock of all spans."""
        self._spans: list[Span] = []
        self.under_way: set[Task] = set()
        """Calls in progress."""
        self.first_end: dict[str, float] = {}
        """End of the first work of each role."""

    def add(self, role: str, start: float, end: float, worker: int = 0) -> None:
        """Record finished work.

        Raises:
            ValueError: it ends before it starts.
        """
        if end < start:
            raise ValueError(f"span of {role}[{worker}] ends at {end:.6f}, before its start at {start:.6f}")
        self._spans.append(Span(role, worker, start, end))
        self.first_end.setdefault(role, end)

    def add_returned(self, role: str, seconds: float, worker: int = 0) -> None:
        """Record a call of `seconds` (measured by the worker) whose answer arrived just now, from any host."""
        end = self.now()
        self.add(role, end - max(seconds, 0.0), end, worker)

    @contextmanager
    def waiting_for(self, task: Task) -> Iterator[None]:
        """Register a call while its answer is awaited."""
        self.under_way.add(task)
        try:
            yield
        finally:
            self.under_way.discard(task)

    def work(self, start: float, end: float) -> list[Span]:
        """Spans that reach into the window; calls in progress count from their start to `end`. Spans that ended before
        `start` are forgotten: windows are asked for in order of time."""
        self._spans = [s for s in self._spans if s.end > start]
        inside = [s for s in self._spans if s.start < end]
        return inside + [Span(t.role, t.worker, t.since, end) for t in self.under_way if t.since < end]


class Timeline(NamedTuple):
    """A window of time cut into intervals in which no work begins or ends."""

    seconds: NDArray[np.float64]
    """[S] lengths of the intervals; they sum to the window."""
    busy: dict[str, NDArray[np.int64]]
    """Role -> [S] number of its busy workers."""


def timeline(spans: Iterable[Span], start: float, end: float, roles: Iterable[str]) -> Timeline:
    """The number of busy workers of each role between `start` and `end`.

    Overlapping spans of one worker count once; spans are cut at the window, those of other roles left out.
    """
    busy: dict[str, NDArray[np.int64]] = dict.fromkeys(roles, np.zeros(1, np.int64))
    inside = [s for s in spans if s.role in busy and s.end > start and s.start < end]
    numbers: dict[tuple[str, int], int] = {}
    worker = np.array([numbers.setdefault((s.role, s.worker), len(numbers)) for s in inside] * 2, np.int64)
    moment = np.clip([s.start for s in inside] + [s.end for s in inside], start, end)
    change = np.repeat([1, -1], len(inside))
    order = np.lexsort((change, moment, worker))
    calls = np.cumsum(change[order])  # of each worker in turn: it ends as often as it begins, so the next starts at 0
    turns = (calls > 0).astype(np.int64) - (calls > change[order])
    order, turns = order[turns != 0], turns[turns != 0]
    by_time = np.argsort(moment[order], kind="stable")
    order, turns = order[by_time], turns[by_time]
    role_of = np.array([role for role, _ in numbers] or [""])[worker[order]]
    for role in busy:
        busy[role] = np.concatenate([[0], np.cumsum(np.where(role_of == role, turns, 0))])
    return Timeline(np.diff(moment[order], prepend=start, append=end), busy)


Lane = Sequence[Any]
"""Worker ("generator/0"), begin and end of a call in seconds from the step's begin."""


def chrome_trace(lanes: Sequence[Lane]) -> dict[str, Any]:
    """The lanes in the Trace Event Format of Chromium's tracing tool (also read by Perfetto): a process per role, a
    thread per worker, times in microseconds."""
    workers = sorted({lane[0] for lane in lanes})
    roles = sorted({worker.split("/")[0] for worker in workers})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": role}}
        for number, role in enumerate(roles)]
    for worker, start, end in lanes:
        role, rank = worker.split("/")
        events.append({"ph": "X", "name": worker, "cat": "call", "pid": roles.index(role), "tid": int(rank),
                       "ts": start * 1e6, "dur": (end - start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
