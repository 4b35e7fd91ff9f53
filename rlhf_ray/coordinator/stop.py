"""Being asked to stop: the first Ctrl-C or SIGTERM ends the run after the present step, the second ends it at once."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested: str | None = None
        """Name of the signal that asked."""
        self._say = say

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for the enclosed work; must be entered inside the event loop's main thread."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def asked(name: str) -> None:
            if self.requested is not None and task is not None:
                task.cancel(f"second {name}")
                return
            self.requested = name
            self._say(f"{name}: finishing this step, then saving; once more stops at once")

        names = ("SIGINT", "SIGTERM")
        for name in names:
            loop.add_signal_handler(getattr(signal, name), asked, name)
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(getattr(signal, name))
