"""An event loop whose clock jumps to the next timer: minutes of random delays pass in milliseconds, and repeatably."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlhf_ray.files.thread import at_work

REAL_S = 0.0005
"""Real time that passes while a file thread works."""
T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Never waits: when no file is ready, the time that should have been waited has passed. While a file thread has
    work that will come to its end, no time passes: it would run ahead of the disk. (A thread that hangs at a failpoint
    holds up nothing.)"""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        working = at_work()  # before the look: what a thread ends afterwards is seen by the next one
        found = super().select(0)
        if not found and timeout != 0 and working:
            return super().select(REAL_S)
        if not found:
            if timeout is None:
                raise RuntimeError("everything waits, and no timer is set: a deadlock")
            self.now += max(timeout, 0.0)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time; what they order stays in order."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. Threads other than file threads have no place in `work`: nothing waits for them.

    Raises:
        RuntimeError: everything waits for something that will never come.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
