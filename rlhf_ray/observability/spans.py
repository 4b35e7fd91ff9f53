"""Who was busy when: spans of work by role and worker, and what a window of time looked like.

Times are seconds of the coordinator's monotonic clock (`time.monotonic`). Processes of one Linux host share that clock;
hosts do not. A call's own report from another host is placed by when its answer came (`add_returned`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """Work of one worker from `start` to `end`, in seconds of the monotonic clock."""

    role: str
    worker: int
    start: float
    end: float


class Task(NamedTuple):
    """A call that somebody waits for."""

    role: str
    worker: int
    phase: str
    since: float
    """When it was called, in seconds of the monotonic clock."""


class StepClock:
    """Collects spans and sums them up, window by window. Windows are asked for in order of time."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.under_way: set[Task] = set()
        """Calls that are not over."""

    @staticmethod
    def now() -> float:
        """The clock that all spans are in."""
        return time.monotonic()

    def add(self, role: str, start: float, end: float, worker: int = 0) -> None:
        """Record work that is over.

        Raises:
            ValueError: it ends before it starts.
        """
        if end < start:
            raise ValueError(f"span of {role}[{worker}] ends at {end:.6f}, before its start at {start:.6f}")
        self._spans.append(Span(role, worker, start, end))

    def add_returned(self, role: str, seconds: float, worker: int = 0) -> None:
        """Record a call of `seconds` (the worker's own measure) whose answer came just now, from any host."""
        end = self.now()
        self.add(role, end - max(seconds, 0.0), end, worker)

    @contextmanager
    def waiting_for(self, task: Task) -> Iterator[None]:
        """Know of a call while its answer is awaited."""
        self.under_way.add(task)
        try:
            yield
        finally:
            self.under_way.discard(task)

    def work(self, start: float, end: float) -> list[Span]:
        """Spans that reach into the window, calls under way included, from when they were made to `end`.

        Spans of windows that were summed up before are not there any more.
        """
        inside = [s for s in self._spans if s.end > start and s.start < end]
        return inside + [Span(t.role, t.worker, t.since, end) for t in self.under_way if t.since < end]

    def summary(self, start: float, end: float, workers: Mapping[str, int]) -> dict[str, float]:
        """What happened between `start` and `end`. `workers` gives the number of workers of each role.

        Overlapping spans of one worker count once; spans are cut at the window. Spans that ended before `start` are
        forgotten.

        Returns, for each role of `workers`:
            busy/<role>: seconds of work, summed over its workers.
            idle/<role>: 1 - busy / (workers x window), in [0, 1].
            wait/<role>: seconds in which none of its workers was busy.
        and wait/all: seconds in which nobody was busy, the coordinator's own overhead.

        Raises:
            ValueError: the window is empty, or a role has no workers.
        """
        if end <= start or any(count < 1 for count in workers.values()):
            raise ValueError(f"no time or no workers to sum up: window {start:.6f}..{end:.6f}, workers {dict(workers)}")
        self._spans = [s for s in self._spans if s.end > start]
        inside: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for s in self._spans:
            if s.role in workers and s.start < end:
                inside[s.role][s.worker].append((max(s.start, start), min(s.end, end)))
        window, result = end - start, {}
        for role, count in workers.items():
            busy = sum(union_seconds(spans) for spans in inside[role].values())
            result[f"busy/{role}"] = busy
            result[f"idle/{role}"] = min(max(1.0 - busy / (count * window), 0.0), 1.0)
            result[f"wait/{role}"] = window - union_seconds(s for spans in inside[role].values() for s in spans)
        everyone = (s for by_worker in inside.values() for spans in by_worker.values() for s in spans)
        result["wait/all"] = window - union_seconds(everyone)
        return result


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
