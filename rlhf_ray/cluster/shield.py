"""Ray's own processes out of reach of signals that are meant for the run.

A terminal, `timeout` and schedulers signal a whole process group. Ray blocks SIGINT in the processes that it starts,
and not SIGTERM: they would end at once, while the run that they serve still saves its checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ray._private import services


@contextmanager
def process_group_of_their_own() -> Iterator[None]:
    """Processes that Ray starts meanwhile begin a process group each. They still end when this process does."""
    start = services.ConsolePopen
    services.ConsolePopen = partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start
