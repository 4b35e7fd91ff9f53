"""Ray's own processes out of reach of signals that are meant for the run.

A terminal, `timeout` and schedulers signal a whole process group. Ray blocks SIGINT in the processes that it starts,
and not SIGTERM: they would end at once, while the run that they serve still saves its checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray._private import services, worker


@contextmanager
def process_group_of_their_own() -> Iterator[None]:
    """Processes that Ray starts meanwhile begin a process group each. They still end when this process does."""
    start = services.ConsolePopen
    services.ConsolePopen = partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start


DEATH = "A worker died or was killed while executing a task by an unexpected system error"


@contextmanager
def deaths_told_once() -> Iterator[None]:
    """Ray's paragraph about each worker that died stays unprinted meanwhile: the run says it in a line, with what it
    does about it. Ray's other messages are printed as ever, and the logs hold them all."""
    printed = worker.print_to_stdstream

    def others(data: dict[str, Any], *args: Any, **keywords: Any) -> None:
        if not any(line.startswith(DEATH) for line in data["lines"]):
            printed(data, *args, **keywords)

    worker.print_to_stdstream = others
    try:
        yield
    finally:
        worker.print_to_stdstream = printed
