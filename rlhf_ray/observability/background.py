"""Tasks beside the work of a run (who hangs? what is asked?): each is watched, so that none of them dies in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rlhf_ray.errors import BackgroundTaskError, first_line

AGAIN_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""From a failure to the next beginning, by the number of failures in a row."""
STEADY_S = 60.0
"""A task that has worked for so long is no longer held to have failed in a row."""

Tell = Callable[[str, Exception, float], None]
"""Told of each failure: the task's name, what it raised, and after how many seconds it is begun again."""


def log_failure(name: str, error: Exception, again_s: float) -> None:
    """Tell of a failure by Python's logging."""
    logging.getLogger(__name__).warning("%s", in_words(name, error, again_s))


def in_words(name: str, error: Exception, again_s: float) -> str:
    """A failure, for a person."""
    return f"{name} failed ({type(error).__name__}: {first_line(error)}); it begins again in {again_s:g} s"


@asynccontextmanager
async def beside(
    name: str, work: Callable[[], Awaitable[None]], tell: Tell = log_failure, essential: bool = False
) -> AsyncIterator[None]:
    """Let `work` go on during the enclosed block. What it raises is told, and it is begun again after a while.

    Args:
        name: of the task, for a person.
        work: begins the work; it goes on until it is cancelled, or returns when it is done.
        essential: a run must not go on without it: after as many failures in a row as `AGAIN_S` has pauses, the block
            ends.

    Raises:
        BackgroundTaskError: an essential task failed for good.
    """
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    fatal: list[Exception] = []

    async def watched() -> None:
        failures = 0
        while True:
            began = loop.time()
            try:
                await work()
                return
            except Exception as error:
                failures = failures + 1 if loop.time() - began < STEADY_S else 1
                if essential and failures > len(AGAIN_S) and main is not None:
                    fatal.append(error)
                    main.cancel()
                    return
                again_s = AGAIN_S[min(failures, len(AGAIN_S)) - 1]
                _told(tell, name, error, again_s)
            await asyncio.sleep(again_s)

    task = asyncio.create_task(watched(), name=name)
    try:
        yield
    except asyncio.CancelledError:
        if fatal and main is not None:
            main.uncancel()
            raise BackgroundTaskError(
                f"{name} failed {len(AGAIN_S) + 1} times in a row, and the run must not go on without it: "
                f"{type(fatal[0]).__name__}: {first_line(fatal[0])}") from fatal[0]
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _told(tell: Tell, name: str, error: Exception, again_s: float) -> None:
    try:
        tell(name, error, again_s)
    except Exception:
        log_failure(name, error, again_s)
