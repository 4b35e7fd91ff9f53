"""A thread per tracker delivers the rows of metrics to it, so that a slow or missing server never delays the run.

A row that is never delivered is still in metrics.jsonl.
"""

from __future__ import annotations

import logging as log
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlhf_ray.errors import ConfigError, first_line
from rlhf_ray.files.fsync import moved

OPENING_S = 60.0
"""Longest wait for the tracker of a new run to open; W&B needs most of it before it falls back to offline mode."""
LATE_S = 60.0
"""Silence in one call after which a warning is logged."""
CLOSING_S = 30.0
"""Longest wait for queued rows at the end of a run: less than the notice of a spot machine."""
MOST_ROWS = 1000
"""Largest number of queued rows; some twenty megabytes."""


class Tracker(Protocol):
    """A service that keeps numbers of many runs. One thread calls it; each call may raise any error, or never
    return."""

    title: str
    """Name shown to the user."""
    where: str
    """Its server's address, or another description of its target."""
    fix: str
    """What to do when it cannot be opened."""

    def open(self) -> None:
        """Find or create its record of the run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one step's finite numbers."""

    def close(self) -> None:
        """Deliver what it buffers itself, and mark the run as ended."""


class Delivery:
    """A sink that hands every row to a tracker's thread, and waits only in `close`, for a bounded time.

    The first problem is logged when it occurs, and at the end the number of rows that the tracker lacks.
    """

    def __init__(self, tracker: Tracker, must_open: bool) -> None:
        """
        Args:
            must_open: wait until the tracker is open, and fail if it cannot be opened; otherwise rows are queued until
                it is open.

        Raises:
            ConfigError: it must be open, and cannot be opened, or does not answer in time.
        """
        self._tracker = tracker
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._written = self._arrived = 0
        self._asked_at: float | None = None
        """Start of the call in progress; None between calls."""
        self._failure: Exception | None = None
        """Why it could not be opened."""
        self._open, self._given_up, self._warned = threading.Event(), False, False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"{tracker.title} tracker")
        self._thread.start()
        if must_open:
            self._require_open()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a row."""
        self._written += 1
        asked_at = self._asked_at
        if self._rows.qsize() >= MOST_ROWS:
            self._warn(f"does not keep up: {MOST_ROWS} rows wait for {self._tracker.where}, and no others will until "
                       "it takes some")
            return
        self._rows.put((step, dict(values)))
        if asked_at is not None and time.monotonic() - asked_at > LATE_S:
            self._warn(f"has not answered for {LATE_S:g} s ({self._tracker.where})")

    def close(self) -> None:
        """Let the tracker take the queued rows within its time."""
        self._rows.put(None)
        late, self._given_up = not _in_time(self._ended, CLOSING_S), True
        missing = self._written - self._arrived
        why = f": {self._tracker.where} did not take them within {CLOSING_S:g} s" if late else ""
        if missing:
            self._say(f"{self._tracker.title} lacks {missing} of {self._written} rows{why}. metrics.jsonl has them")
        elif late:
            self._say(f"{self._tracker.title} has all rows, but its connection was not closed within {CLOSING_S:g} s "
                      f"({self._tracker.where})")

    def _ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _require_open(self) -> None:
        if not _in_time(self._open.wait, OPENING_S):
            self._given_up = True
            raise ConfigError(f"{self._tracker.title} cannot be opened: {self._tracker.where} has not answered within "
                              f"{OPENING_S:g} s; {self._tracker.fix}")
        if self._failure is not None:
            raise ConfigError(f"{self._tracker.title} cannot be opened at {self._tracker.where}: "
                              f"{first_line(self._failure)}; {self._tracker.fix}") from self._failure

    def _work(self) -> None:
        self._failure = self._ask(self._tracker.open)
        self._open.set()
        if self._failure is not None:
            self._warn(f"gets no numbers: it cannot be opened at {self._tracker.where}: {first_line(self._failure)}")
            return
        while not self._given_up and (row := self._rows.get()) is not None:
            if (error := self._ask(self._tracker.write, *row)) is None:
                self._arrived += 1
            else:
                self._warn(f"did not take the numbers of step {row[0]}: {first_line(error)}")
        if not self._given_up and (error := self._ask(self._tracker.close)) is not None:
            self._warn(f"could not be closed: {first_line(error)}")

    def _ask(self, call: Callable[..., None], *arguments: Any) -> Exception | None:
        """Make one call; returns what it raised."""
        self._asked_at = time.monotonic()
        try:
            call(*arguments)
        except Exception as error:  # the tracker's library may raise anything
            return error
        finally:
            self._asked_at = None
        return None

    def _warn(self, trouble: str) -> None:
        """Log the first problem only; nothing once the tracker was given up."""
        if not self._warned and not self._given_up:
            self._warned = True
            self._say(f"{self._tracker.title} {trouble}. The run continues; its numbers are in metrics.jsonl")

    def _say(self, text: str) -> None:
        log.getLogger(__name__).warning("%s", text)


def _in_time(over: Callable[[float], bool], limit_s: float) -> bool:
    """Wait for something, piece by piece: a wait with a deadline is no standstill of the file thread that it runs
    in."""
    end = time.monotonic() + limit_s
    while (left_s := end - time.monotonic()) > 0:
        if over(min(left_s, 1.0)):
            return True
        moved()
    return over(0.0)
