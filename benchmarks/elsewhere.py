"""Work in a process of its own, so that the benchmarks' own process stays small and starts nothing."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def elsewhere(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What `work` returns, or raises, in a process that ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments, **named).result()
