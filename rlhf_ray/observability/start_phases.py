"""The phases of a stage between its command and its first step: each is announced when it begins, and a sentence says
at the end how long each took.

A process starts one stage at a time, so there is one record, `START`.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def announce(text: str) -> None:
    """Print what is being done where there is no progress bar, before and after it."""
    print(text, flush=True)  # noqa: T201


class StartPhases:
    """The phases so far.

    Example:
        >>> start = StartPhases()
        >>> start.begin("Ray", "starting Ray")
        starting Ray
        >>> start.ready()
        'ready after 0.0 s: Ray 0.0'
    """

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = []

    def begin(self, name: str, announcement: str, say: Callable[[str], None] = announce) -> None:
        """End the phase before and begin another one.

        Args:
            name: in the sentence at the end.
            announcement: what is being done.
        """
        self._begun.append((name, time.monotonic()))
        say(announcement)

    def restart(self) -> None:
        """Forget the phases of a stage that did not become ready."""
        self._begun.clear()

    def ready(self) -> str:
        """End the start; returns the sentence about it."""
        ends = [*(began for _, began in self._begun[1:]), time.monotonic()]
        parts = [f"{name} {end - began:.1f}" for (name, began), end in zip(self._begun, ends, strict=True)]
        total = ends[-1] - self._begun[0][1] if self._begun else 0.0
        self.restart()
        return f"ready after {total:.1f} s: {', '.join(parts)}"


START = StartPhases()
"""The start of this process's stage."""
