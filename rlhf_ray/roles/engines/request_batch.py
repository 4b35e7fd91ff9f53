"""The requests of one call to an engine on another thread, and the one moment at which the call is woken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass
class RequestBatch:
    """The requests of one call. It is woken once, when the last of them is over and all results are made: two threads
    that both have something to do pass Python's lock to and fro, which costs them more than the work itself."""

    results: dict[str, Any]
    """By request, in the call's order; None while it is drawn."""
    make: Callable[[Any], Any]
    """A result of vLLM's output."""
    done: Future[list[Any]]
    left: int

    @classmethod
    def of(cls, request_ids: Sequence[str], make: Callable[[Any], Any]) -> RequestBatch:
        """None of them is over."""
        return cls(dict.fromkeys(request_ids), make, Future(), len(request_ids))

    def take(self, output: Any) -> None:
        """One of them is over."""
        try:
            self.results[output.request_id] = self.make(output)
        except Exception as error:
            self.fail(error)
        self.left -= 1
        if not self.left and self._wanted():
            self.done.set_result(list(self.results.values()))

    def fail(self, error: Exception) -> None:
        """They will not all be; may be said more than once."""
        if self._wanted():
            self.done.set_exception(error)

    def _wanted(self) -> bool:
        return not self.done.done() and self.done.set_running_or_notify_cancel()
