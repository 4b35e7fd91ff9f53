"""Internals of asyncio: a coroutine runs to its end also where an event loop runs already, as in every cell of a
notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. A loop that runs in this thread waits meanwhile, as it does during any call that blocks.

    The new loop is in the same thread, because only the main thread may handle signals: interrupting a cell saves a
    checkpoint, as Ctrl-C does.

    Source: Python 3.11 and 3.12, Lib/asyncio/events.py, whose `__all__` has both functions for authors of event loops.
    Missing: a public way to run a loop inside of another one.
    Otherwise: `rlhf_ray.run` fails in notebooks, as `asyncio.run` does there.
    """
    outer = asyncio._get_running_loop()
    if outer is None:
        return asyncio.run(main)
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(main)
    finally:
        asyncio._set_running_loop(outer)
        asyncio.set_event_loop(outer)
