"""The progress of a run somewhere else, from the lines that it prints: the same live bar as of one in this terminal."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Self, TextIO

from rich.progress import Progress, TaskID
from rich.text import Text

from rlhf_ray.observability.progress import is_terminal, live_progress

STEP = re.compile(
    r"(?P<name>[\w /-]+): step (?P<step>\d+)/(?P<total>\d+)(?P<numbers>.*?)(?P<left>(?:  \S+( \S+)* left)?)")
"""A line of `StageProgress` where its output is no terminal: its parts have two spaces between them."""


def newest_step(text: str) -> str | None:
    """The last line of progress in what a run printed; None without one."""
    return next((line for line in reversed(text.splitlines()) if STEP.fullmatch(line)), None)


class FollowedProgress:
    """Shows what comes in as it comes, in pieces of any size; on a terminal lines of progress become a bar.

    Args:
        stream: where to; standard output when empty.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._unfinished = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._unfinished:
            self._line(self._unfinished)
        self._close()

    def feed(self, text: str) -> None:
        """Show `text`; half a line waits for its other half."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        found = STEP.fullmatch(line)
        if not is_terminal(self._stream):
            self._stream.write(line + "\n")
            self._stream.flush()
        elif found:
            self._step(found)
        elif self._live is not None:
            self._live.console.print(Text(line), soft_wrap=True)
        else:
            self._stream.write(line + "\n")

    def _step(self, found: re.Match[str]) -> None:
        if self._live is None:
            self._live = live_progress(self._stream)
            self._live.start()
        name, total = found["name"], int(found["total"])
        if name not in self._tasks:
            self._tasks[name] = self._live.add_task(name, total=total, left="", numbers="")
        self._live.update(self._tasks[name], total=total, completed=int(found["step"]),
                          numbers=found["numbers"].strip(), left=found["left"].strip())

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
