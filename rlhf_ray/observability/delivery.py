"""Rows of metrics on their way to a tracker, in a thread of their own: whatever its server does, the run goes on.

Owns the queue and every deadline of a tracker; what becomes of a row is the tracker's. A row that never arrives is in
metrics.jsonl like any other.
"""

from __future__ import annotations

import logging as log
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlhf_ray.errors import ConfigError, first_line
from rlhf_ray.files.durable import moved

OPENING_S = 60.0
"""For the tracker of a new run to be there; W&B, which goes offline by itself, needs most of it for that."""
LATE_S = 60.0
"""Of silence in one call, until that is said."""
CLOSING_S = 30.0
"""For what still waits at the end of a run: less than the notice that a spot machine gets."""
MOST_ROWS = 1000
"""That wait; some twenty megabytes."""


class Tracker(Protocol):
    """A place that keeps numbers of many runs. One thread calls it; each call may raise anything, or never return."""

    title: str
    """Its name, for a person."""
    where: str
    """Its server's address, or what else is asked."""
    fix: str
    """What to do where it cannot be opened."""

    def open(self) -> None:
        """Find or make its record of the run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one step's finite numbers."""

    def close(self) -> None:
        """Deliver what it holds back itself, and say that the run is over."""


class Delivery:
    """A sink that hands every row to a tracker's thread and never waits but in `close`, for a bounded time.

    What goes wrong is said when it goes wrong first, and at the end how many rows the tracker lacks.
    """

    def __init__(self, tracker: Tracker, must_open: bool) -> None:
        """
        Args:
            must_open: wait until the tracker is open, and refuse to begin without it; else rows wait for that.

        Raises:
            ConfigError: it must be open, and cannot be, or does not answer in time.
        """
        self._tracker = tracker
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._written = self._arrived = 0
        self._asked_at: float | None = None
        """Since when the call under way is waited for; None between two calls."""
        self._failure: Exception | None = None
        """Why it could not be opened."""
        self._open, self._given_up, self._warned = threading.Event(), False, False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"{tracker.title} tracker")
        self._thread.start()
        if must_open:
            self._require_open()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand a row over."""
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
        """Give the tracker its time to take what waits, then go without it."""
        self._rows.put(None)
        late, self._given_up = not _in_time(self._ended, CLOSING_S), True
        missing = self._written - self._arrived
        why = f": {self._tracker.where} did not take them within {CLOSING_S:g} s" if late else ""
        if missing:
            self._say(f"{self._tracker.title} lacks {missing} of {self._written} rows{why}. metrics.jsonl has them")
        elif late:
            self._say(f"{self._tracker.title} has all rows, and was not told within {CLOSING_S:g} s that the run is "
                      f"over ({self._tracker.where})")

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
            self._warn(f"was not told that the run is over: {first_line(error)}")

    def _ask(self, call: Callable[..., None], *arguments: Any) -> Exception | None:
        """Make one call; returns what it raised."""
        self._asked_at = time.monotonic()
        try:
            call(*arguments)
        except Exception as error:  # whatever the library of this tracker raises
            return error
        finally:
            self._asked_at = None
        return None

    def _warn(self, trouble: str) -> None:
        """Say the first trouble, and no other; nothing when nobody waits any more."""
        if not self._warned and not self._given_up:
            self._warned = True
            self._say(f"{self._tracker.title} {trouble}. The run goes on; its numbers are in metrics.jsonl")

    def _say(self, text: str) -> None:
        log.getLogger(__name__).warning("%s", text)


def _in_time(over: Callable[[float], bool], limit_s: float) -> bool:
    """Wait for something, piece by piece: a wait that has an end is no standstill of the file thread that it is in."""
    end = time.monotonic() + limit_s
    while (left_s := end - time.monotonic()) > 0:
        if over(min(left_s, 1.0)):
            return True
        moved()
    return over(0.0)
