"""Threads for passes over a bucket's bytes: XXH3 and memory copies, which release Python's lock."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 8
"""Threads. A few saturate the memory of a node."""
WORTH_IT = 8 << 20
"""Bytes that one thread hashes in a millisecond; for fewer, handing over the work takes a noticeable part of it."""


def in_parallel(function: Callable[..., T], *arguments: Iterable[Any], nbytes: int) -> Iterator[T]:
    """As `map`: results and errors in the order of the arguments. On several threads if there are `nbytes` to pass over
    and this process may use enough CPUs."""
    threads = _threads() if nbytes >= WORTH_IT else None
    return map(function, *arguments) if threads is None else threads.map(function, *arguments)


@cache
def _threads() -> ThreadPoolExecutor | None:
    """One for every second CPU, because the other side of a publication is at work too; None if that is one."""
    number = min(MOST, len(os.sched_getaffinity(0)) // 2)
    return ThreadPoolExecutor(number, "weights") if number > 1 else None
