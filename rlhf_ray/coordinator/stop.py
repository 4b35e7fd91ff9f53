"""Requests to stop: the first Ctrl-C, SIGTERM or SIGHUP (its terminal was closed) ends the run as soon as it is saved,
the second ends it at once. While there is nothing to save yet (workers are starting), the first one ends it at once
too. A SIGHUP after another signal changes nothing: kernel and shell may each send one. It stays ignored where it was
ignored at the start, as by nohup.

One request may arrive as two signals: Ray signals all processes of a job, and the parent process of `run.auto_resume`
forwards its signals to its child. So such a child treats all signals within a second as one request."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlhf_ray.errors import STOP_SIGNALS, RunInterrupted

T = TypeVar("T")
CHILD = "RLHF_RAY_STARTED_BY_AUTO_RESUME"
"""Environment variable of a run whose parent process forwards signals to it (`run.auto_resume`)."""
ONE_REQUEST_S = 1.0


def signals_to_handle() -> list[signal.Signals]:
    """The signals that request a stop, without a SIGHUP that is ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number is signal.SIGHUP)]


class StopRequest:
    """Whether the run was requested to stop."""

    def __init__(self, say: Callable[[str], None], hurry: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            say: shows a message to the user.
            hurry: called when the run shall end at once.
        """
        self.requested: str | None = None
        """Name of the signal, or of another reason."""
        self.can_save = False
        """Whether there is a state to save before the run ends."""
        self._say, self._hurry = say, hurry
        self._signalled = False
        """Whether a signal has arrived already."""
        self._deaf_s = ONE_REQUEST_S if CHILD in os.environ else 0.0
        self._signalled_at = 0.0
        self._asked = asyncio.Event()

    def ask(self, name: str) -> None:
        """Request the run to stop; `name` is that of the signal, or another reason."""
        self.requested = name
        self._asked.set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals in the block; must be entered in the event loop's main thread.

        Raises:
            RunInterrupted: stopped at once. The last checkpoint is intact.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def asked(name: str) -> None:
            if self._signalled and (name == "SIGHUP" or time.monotonic() - self._signalled_at < self._deaf_s):
                return
            hurry = self._signalled or not self.can_save
            self._signalled, self._signalled_at = True, time.monotonic()
            self.ask(name)
            if hurry and task is not None:
                self._hurry()
                task.cancel()
            else:
                self._say(f"{name}: saving as soon as the update under way is done; a second signal stops at once")

        numbers = signals_to_handle()
        for number in numbers:
            loop.add_signal_handler(number, asked, number.name)
        try:
            yield
        except asyncio.CancelledError:
            if self.requested is None:
                raise
            raise RunInterrupted(f"stopped at once by {self.requested}; --resume continues from the last checkpoint, "
                                 "or "
                                 "starts anew if there is none") from None
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if a stop is requested before: `work` is cancelled then."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

