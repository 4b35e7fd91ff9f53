"""Tasks that run in the background of a stage (health checks, requests, the status). A task that fails is reported and
started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rlhf_ray.errors import BackgroundTaskError, first_line

RETRY_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds until a failed task starts again, by the number of failures in a row."""
STEADY_S = 60.0
"""A task that ran for this long before it failed starts a new count of failures."""

OnFailure = Callable[[str, Exception, float], None]
"""Called for each failure with the task's name, the error, and the seconds until the task starts again."""


def log_failure(name: str, error: Exception, again_s: float) -> None:
    """Log a failure."""
    logging.getLogger(__name__).warning("%s", describe_failure(name, error, again_s))


def describe_failure(name: str, error: Exception, again_s: float) -> str:
    """A failure as a sentence."""
    return f"{name} failed ({type(error).__name__}: {first_line(error)}); it starts again in {again_s:g} s"


@asynccontextmanager
async def background_task(
    name: str, work: Callable[[], Awaitable[None]], on_failure: OnFailure = log_failure, essential: bool = False
) -> AsyncIterator[None]:
    """Run `work` in the background of the enclosed block. Its errors are reported, and it starts again after a pause.

    Args:
        name: of the task, for messages.
        work: makes the coroutine; it runs until it is cancelled, or returns when it is done.
        on_failure: called for each failure.
        essential: the stage must not continue without it: the block ends when the task fails once more in a row than
            `RETRY_PAUSES_S` has pauses.

    Raises:
        BackgroundTaskError: an essential task failed too often.
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
                if essential and failures > len(RETRY_PAUSES_S) and main is not None:
                    fatal.append(error)
                    main.cancel()
                    return
                again_s = RETRY_PAUSES_S[min(failures, len(RETRY_PAUSES_S)) - 1]
                _report(on_failure, name, error, again_s)
            await asyncio.sleep(again_s)

    task = asyncio.create_task(watched(), name=name)
    try:
        yield
    except asyncio.CancelledError:
        if fatal and main is not None:
            main.uncancel()
            raise BackgroundTaskError(
                f"{name} failed {len(RETRY_PAUSES_S) + 1} times in a row, and the run must not continue without it: "
                f"{type(fatal[0]).__name__}: {first_line(fatal[0])}. Continue from the last checkpoint "
                "with --resume") from fatal[0]
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _report(on_failure: OnFailure, name: str, error: Exception, again_s: float) -> None:
    try:
        on_failure(name, error, again_s)
    except Exception:
        log_failure(name, error, again_s)
