"""Requests to stop: the first Ctrl-C, SIGTERM or SIGHUP (its terminal was closed) ends the run as soon as it is saved,
the second ends it at once. While there is nothing to save yet (workers are starting), the first one ends it at once
too. A SIGHUP after another signal changes nothing: kernel and shell may each send one. It stays ignored where it was
ignored at the start, as by nohup.

A command that runs a stage ends with exit code 75 from its first statement to the end of its process, however many
signals arrive: those outside of the loop end it at once as well, and those that arrive while it ends change nothing.

One request may arrive as two signals: Ray signals all processes of a job, and the parent process of `run.auto_resume`
forwards its signals to its child. So such a child treats all signals within a second as one request."""

import asyncio
import atexit
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlhf_ray.errors import STOP_SIGNALS, RunInterrupted, SupersededError

T = TypeVar("T")
CHILD = "RLHF_RAY_STARTED_BY_AUTO_RESUME"
"""Environment variable of a run whose parent process forwards signals to it (`run.auto_resume`)."""
ONE_REQUEST_S = 1.0
END_S = 30.0
"""How long signals change nothing after one that ends the process at once: all that has to be cleaned up has a shorter
deadline, a local cluster among it (20 s). Later ones are for a process that does not end."""


def signals_to_handle() -> list[signal.Signals]:
    """The signals that request a stop, without a SIGHUP that is ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number is signal.SIGHUP)]


def handle_signals(take: Callable[[signal.Signals], Any]) -> dict[signal.Signals, Any]:
    """Call `take` with each signal that requests a stop, between two statements of the main thread; returns the
    handlers of before."""
    return {number: signal.signal(number, lambda number, _: take(signal.Signals(number)))
            for number in signals_to_handle()}


def restore_handlers(handlers: dict[signal.Signals, Any]) -> None:
    """Install what `handle_signals` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StoppedAtOnce(SystemExit):
    """A signal ended the process outside of `StopRequest.listening`. It is neither an `Exception`, which a library may
    catch, nor a `KeyboardInterrupt`, for which typer has another exit code."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(RunInterrupted.exit_code)
        self.message = _at_once(number.name)


class ReceivedSignals:
    """The signals that arrived so far, and what those do that arrive outside of `StopRequest.listening` once this
    object handles them."""

    def __init__(self) -> None:
        self.any = False
        """Whether one arrived."""
        self.handling = False
        """Whether `handle` was called, and `process_ends` was not."""
        self._at = self._quiet_until = 0.0
        self._one_request_s = ONE_REQUEST_S if CHILD in os.environ else 0.0
        self._before: dict[signal.Signals, Any] = {}

    def handle(self) -> None:
        """From now on a signal raises `StoppedAtOnce`."""
        if not self._before:
            self._before = handle_signals(self._take)
            atexit.register(self._ignore)
        self.any, self.handling, self._quiet_until = False, True, 0.0

    def process_ends(self) -> None:
        """From now on signals change nothing, because nothing is left to be stopped."""
        self.handling = False
        self.ignore_for_a_while()

    def is_request(self, number: signal.Signals) -> bool:
        """Whether a signal that has just arrived is a request, and not the repetition of one."""
        now = time.monotonic()
        if self.any and (number is signal.SIGHUP or now - self._at < self._one_request_s):
            return False
        self.any, self._at = True, now
        return True

    def ignore_for_a_while(self) -> None:
        """The process ends at once, which further signals cannot make faster."""
        self._quiet_until = time.monotonic() + END_S

    def _ignore(self) -> None:
        """Python removes its own handlers while it ends, and a signal would kill the process then."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: signal.Signals) -> None:
        if not self.is_request(number) or time.monotonic() < self._quiet_until:
            return
        self.ignore_for_a_while()
        if self.handling:
            raise StoppedAtOnce(number)
        restore_handlers(self._before)  # something keeps the process from ending
        signal.raise_signal(number)


OF_COMMAND = ReceivedSignals()
"""Those of a command that runs a stage."""


def _at_once(name: str | None) -> str:
    return (f"stopped at once by {name}; --resume continues from the last checkpoint, or starts anew if there is none")


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
        self._received = OF_COMMAND if OF_COMMAND.handling else ReceivedSignals()
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
        at_once = over = False

        def asked(number: signal.Signals) -> None:
            nonlocal at_once
            repeated = self._received.any
            if over or not self._received.is_request(number):
                return
            self.ask(number.name)
            if (repeated or not self.can_save) and task is not None:
                at_once = True
                self._received.ignore_for_a_while()
                self._hurry()
                task.cancel()
            else:
                self._say(f"{number.name}: saving as soon as the update under way is done; a second signal stops at "
                          "once")

        handlers = handle_signals(lambda number: loop.call_soon_threadsafe(asked, number))
        try:
            yield
        except asyncio.CancelledError:
            if self.requested is None:
                raise
            raise RunInterrupted(_at_once(self.requested)) from None
        except Exception as error:
            if not at_once or isinstance(error, SupersededError):
                raise
            raise RunInterrupted(_at_once(self.requested)) from error  # an error of the work that was cancelled
        finally:
            restore_handlers(handlers)
            over = True
        if at_once:  # the work ended before the cancellation reached it
            raise RunInterrupted(_at_once(self.requested))

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

