"""An event loop in which waiting takes no time: when nothing is left to do it jumps to the next timer.

Computing takes as long as it takes, so a coordinator that is slower than its workers is as late as it would be beside
real ones; hours of waiting for stand-ins pass in the time that the coordinator itself works.
"""

import asyncio
import selectors
import time

from rlhf_ray.files.thread import at_work

REAL_S = 0.0005
"""Real time that passes while a file thread works."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its `time` is the CPU time of this thread plus the time jumped over, in seconds."""

    def __init__(self, computing_counts: bool = True) -> None:
        """With `computing_counts` off only jumps move the clock, and a run is the same every time."""
        self._jumped, self._began, self._computing_counts = 0.0, time.thread_time(), computing_counts
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        computed = time.thread_time() - self._began if self._computing_counts else 0.0
        return self._jumped + computed

    def jump(self, seconds: float) -> None:
        """Move the clock on."""
        self._jumped += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Looks what has arrived, and jumps instead of waiting."""

    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now. Waits in earnest only where no timer is set, which is for another thread."""
        working = at_work()  # before the look: what a thread ends afterwards is seen by the next one
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout and working:  # the disk takes its time, during which nothing else would happen
            return super().select(REAL_S)
        if not ready and timeout:
            self._loop.jump(timeout)
        return ready
