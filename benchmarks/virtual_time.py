"""An event loop in which waiting takes no time: when nothing is left to do, its clock jumps to the next timer.

Hours of sleeping pass in the time that the coroutines compute, and sleeps keep the order in which they end. File
threads are the only other threads that the clock waits for.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlhf_ray.files.writer_thread import at_work

REAL_S = 0.0005
"""Real time that passes while a file thread works, in seconds."""
T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time` is the time jumped over, in seconds. With `computing_counts` the CPU time of the loop's thread is
    added, so a coordinator that is slower than its workers is as late as it would be with real ones; without, a run
    is the same every time."""

    def __init__(self, computing_counts: bool = False) -> None:
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
    """Never waits: when no file is ready, the clock moves on by the time that should have been waited. While a file
    thread has work that will come to its end, no time passes: the clock would run ahead of the disk. (A thread that
    hangs at a failpoint does not stop the clock.)"""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The files that are ready now.

        Raises:
            RuntimeError: no timer is set, and no file thread works: nothing would ever happen.
        """
        working = at_work()  # before the look: what a thread ends afterwards is seen by the next one
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if working:
            return super().select(REAL_S)
        if timeout is None:
            raise RuntimeError("everything waits, and no timer is set: a deadlock")
        self._loop.jump(max(timeout, 0.0))
        return ready


def run_in_virtual_time(work: Coroutine[Any, Any, T], computing_counts: bool = False) -> T:
    """As `asyncio.run`, in a `VirtualTimeLoop`. `work` must not wait for threads other than file threads.

    Raises:
        RuntimeError: everything waits for something that will never come.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(computing_counts)) as runner:
        return runner.run(work)
