"""How a training run is told to take turns: it reports the times of its updates and waits for leave to make more.

Imported by both sides, so it needs the standard library alone.
"""

import time
from multiprocessing.connection import Connection


class Pacing:
    """The run's end of the line. `updated` is to be called at the end of every update."""

    def __init__(self, line: int) -> None:
        """`line` is the descriptor of a pipe to the benchmark, which this process inherited."""
        self._line = Connection(line)
        self._left = 1  # the first update is for warming up
        self._times = [time.monotonic()]

    def updated(self) -> None:
        """An update is over. At the end of a turn: send when each one ended, and wait for the next turn."""
        self._times.append(time.monotonic())
        self._left -= 1
        if self._left:
            return
        self._line.send(self._times)
        self._left = self._line.recv()
        self._times = [time.monotonic()]
