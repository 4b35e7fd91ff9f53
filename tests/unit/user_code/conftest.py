"""Sandboxes that are started once for each set of limits, since a start takes longer than a program."""

import asyncio
import threading
from typing import Any

import pytest

from rlhf_ray.user_code.process import PrintedLines
from rlhf_ray.user_code.sandbox import Job, Limits, Outcome, Sandbox


class Sandboxes:
    """Runs jobs in an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._kept: dict[Limits, Sandbox] = {}

    def call(self, coroutine: Any) -> Any:
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def of(self, limits: Limits) -> Sandbox:
        """The sandbox with these limits."""
        if limits not in self._kept:
            self._kept[limits] = sandbox = Sandbox("a test", limits, PrintedLines("", ""))
            self.call(sandbox.start())
        return self._kept[limits]

    def run(self, job: Job, limits: Limits) -> Outcome:
        """A program's outcome."""
        outcome: Outcome = self.call(self.of(limits).run(job))
        return outcome

    def stop(self) -> None:
        """End all of them."""
        for each in self._kept.values():
            self.call(each.stop())
        self._kept.clear()


SANDBOXES = Sandboxes()


@pytest.fixture(scope="session", autouse=True)
def sandboxes_end() -> Any:
    """Nothing runs after the tests."""
    yield
    SANDBOXES.stop()
