"""Being asked to stop: the first Ctrl-C or SIGTERM ends the run as soon as it can be saved, the second ends it at once.
While there is nothing to save yet (workers are starting), the first one ends it at once too.

One request may come as two signals: a job that is to stop has all its processes told by Ray, and a parent that starts
runs again (`run.auto_resume`) passes on to its child what it was told. So such a child takes what comes within a second
for one request."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlhf_ray.errors import RunInterrupted

T = TypeVar("T")
CHILD = "RLHF_RAY_STARTED_BY_AUTO_RESUME"
"""Variable of the environment that tells a run that a parent passes signals on to it (`run.auto_resume`)."""
ONE_REQUEST_S = 1.0


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self, say: Callable[[str], None], hurry: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            say: tells a person.
            hurry: called when the run is to end at once.
        """
        self.requested: str | None = None
        """Name of the signal, or of what else asked."""
        self.can_save = False
        """Whether there is something to save, which the first signal leaves time for."""
        self._say, self._hurry = say, hurry
        self._signalled = False
        """Whether a signal asked already; one that follows another's request asks for the same as that."""
        self._deaf_s = ONE_REQUEST_S if CHILD in os.environ else 0.0
        self._signalled_at = 0.0
        self._asked = asyncio.Event()

    def ask(self, name: str) -> None:
        """Ask the run to stop, in the name of a signal, or of whatever else asks."""
        self.requested = name
        self._asked.set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for the enclosed work; must be entered inside the event loop's main thread.

        Raises:
            RunInterrupted: stopped at once. What the last checkpoint holds is safe.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def asked(name: str) -> None:
            if self._signalled and time.monotonic() - self._signalled_at < self._deaf_s:
                return
            hurry = self._signalled or not self.can_save
            self._signalled, self._signalled_at = True, time.monotonic()
            self.ask(name)
            if hurry and task is not None:
                self._hurry()
                task.cancel()
            else:
                self._say(f"{name}: saving as soon as an update under way is done; once more stops at once")

        names = ("SIGINT", "SIGTERM")
        for name in names:
            loop.add_signal_handler(getattr(signal, name), asked, name)
        try:
            yield
        except asyncio.CancelledError:
            if self.requested is None:
                raise
            raise RunInterrupted(f"stopped at once by {self.requested}; --resume goes on from the last checkpoint, or "
                                 "begins anew where there is none yet") from None
        finally:
            for name in names:
                loop.remove_signal_handler(getattr(signal, name))

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None when asked to stop before it is there: `work` is cancelled then."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
