"""Progress shown while a stage runs: a live bar in a terminal, plain lines anywhere else; and the same bar for a run
elsewhere, from its printed lines.

The stage reports its steps; the run never reads anything back.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from rlhf_ray.observability.non_blocking_output import NonBlockingStream, non_blocking

LABELS = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "pairs_per_second": "pairs/s",
    "kl": "KL",
    "learning_rate": "lr",
}
RECENT_STEPS = 20
"""Number of steps whose pace gives the time left."""


class StageProgress:
    """One stage's progress, from `with` to the end of its block. A run of several stages opens one after another.

    Args:
        name: shown at the start of every line.
        total: steps of the whole stage.
        start: steps done before (a resumed run); the pace is measured from here.
        stream: where to write; standard output when empty.
        every_s: in plain output, seconds between lines.
        unit: of `total`, for people.
    """

    def __init__(
        self, name: str, total: int, start: int = 0, stream: TextIO | None = None, every_s: float = 5.0,
        unit: str = "steps",
    ) -> None:
        self._unit = unit
        self.name, self.total, self.step = name, total, start
        given = stream or sys.stdout
        self._stream = non_blocking(given)
        self._own = self._stream is not given
        self._every_s = every_s
        self._began = time.monotonic()
        self._warned: set[str] = set()
        # The pace does not include the start: it is measured from the first finished step.
        self._pace: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS + 1)
        self._numbers: dict[str, float] = {}
        self._printed_at: float | None = None
        self._printed_step: int | None = None
        self._live: Progress | None = None

    def __enter__(self) -> Self:
        if is_terminal(self._stream):
            self._live = live_progress(self._stream)
            self._task = self._live.add_task(self.name, total=self.total, completed=self.step, left="", numbers="")
            self._live.start()
        else:
            self._print(f"{self.name}: {self.total - self.step} of {self.total} {self._unit} to go")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done = error is None and self.step >= self.total
        took = duration(time.monotonic() - self._began)
        ending = f"done in {took}" if done else f"stopped at step {self.step}/{self.total} after {took}"
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._numbers and self._printed_step != self.step:
            self._print(self._line())
        self._print(f"{self.name}: {ending}")
        if isinstance(self._stream, NonBlockingStream):
            self._stream.release() if self._own else self._stream.drain()

    def update(self, step: int, **numbers: float) -> None:
        """Report that `step` steps are done; `numbers` (reward, kl, loss, samples_per_second, ...) are shown with
        it."""
        now = time.monotonic()
        if step < self.step:  # returned to a checkpoint
            self._pace.clear()
        if step != self.step:
            self._pace.append((now, step))
        self.step, self._numbers = step, numbers
        if self._live is not None:
            self._live.update(self._task, completed=step, left=self._left(), numbers=self._shown())
        elif self._printed_at is None or step >= self.total or now - self._printed_at >= self._every_s:
            self._print(self._line())
            self._printed_at, self._printed_step = now, step

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._say(text, style="")

    def warn(self, text: str) -> None:
        """Print a warning above the bar."""
        self._say(f"warning: {text}", style="bold yellow")

    def warn_once(self, text: str) -> None:
        """`warn`, unless the stage has printed the same warning: steps that are made again would repeat it."""
        if text not in self._warned:
            self._warned.add(text)
            self.warn(text)

    def seconds_left(self) -> float | None:
        """Time left at the pace of the last steps, in seconds; None before there is a pace."""
        if len(self._pace) < 2:
            return None
        (then, first), (now, last) = self._pace[0], self._pace[-1]
        return (self.total - self.step) * (now - then) / (last - first)

    def _say(self, text: str, style: str) -> None:
        if self._live is None:
            self._print(f"{self.name}: {text}")
        else:
            self._live.console.print(Text(text, style=style))

    def _line(self) -> str:
        return "  ".join(filter(None, (f"{self.name}: step {self.step}/{self.total}", self._shown(), self._left())))

    def _shown(self) -> str:
        return "  ".join(f"{LABELS.get(k, k.replace('_', ' '))} {_short(v)}" for k, v in self._numbers.items())

    def _left(self) -> str:
        left = self.seconds_left()
        return "" if left is None or self.step >= self.total else f"{duration(left)} left"

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")


def _short(value: float) -> str:
    """A number in few characters: 11,480 and 0.1234, never 1.148e+04."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.2g}"


def is_terminal(stream: TextIO) -> bool:
    """Whether escape codes may be written to `stream`."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def duration(seconds: float) -> str:
    """Seconds as text: 42 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def live_progress(stream: TextIO) -> Progress:
    """A bar whose numbers are cut in a narrow terminal, never the step or the time left."""
    numbers = Column(no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", markup=False, style="cyan"),
        TextColumn("{task.fields[numbers]}", markup=False, table_column=numbers),
    )
    return Progress(*columns, console=Console(file=stream), refresh_per_second=4)


STEP = re.compile(
    r"(?P<name>[\w /.+-]+): step (?P<step>\d+)/(?P<total>\d+)(?P<numbers>.*?)(?P<left>(?:  \S+( \S+)* left)?)")
"""A progress line of `StageProgress` in plain output; its parts are separated by two spaces."""


FINISHED = "finished: "
"""Begins the last line that a stage's command prints, before the run's directory, if it made all its steps."""


def has_finished(text: str) -> bool:
    """Whether the output of a run ends as that of one that made all its steps and wrote everything."""
    lines = text.rstrip().splitlines()
    return bool(lines) and lines[-1].startswith(FINISHED)


def newest_step(text: str) -> str | None:
    """The last progress line in a run's output; None without one."""
    return next((line for line in reversed(text.splitlines()) if STEP.fullmatch(line)), None)


class FollowedProgress:
    """Shows output as it comes, in pieces of any size; on a terminal, progress lines become a bar.

    Args:
        stream: where to write; standard output when empty.
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
        """Show `text`; an incomplete line waits for its rest."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        match = STEP.fullmatch(line)
        if not is_terminal(self._stream):
            self._stream.write(line + "\n")
            self._stream.flush()
        elif match:
            self._step(match)
        elif self._live is not None:
            self._live.console.print(Text(line), soft_wrap=True)
        else:
            self._stream.write(line + "\n")

    def _step(self, match: re.Match[str]) -> None:
        if self._live is None:
            self._live = live_progress(self._stream)
            self._live.start()
        name, total = match["name"], int(match["total"])
        if name not in self._tasks:
            self._tasks[name] = self._live.add_task(name, total=total, left="", numbers="")
        self._live.update(self._tasks[name], total=total, completed=int(match["step"]),
                          numbers=match["numbers"].strip(), left=match["left"].strip())

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
