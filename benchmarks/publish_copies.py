"""The memory copies that any publication to two generators on one node needs, in separate processes.

The learner's process copies its weights into memory that all processes share, then two generators' processes copy them
out into private memory, at the same time. Each copy is one `memcpy` in one piece on one thread. All memory was
written to before: no copy waits for the kernel to find and clear a page. `fresh=True` copies out into pages that are
new each time, as a process that allocates its weights anew does.
"""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Self

import numpy as np

RECEIVERS = 2
TIMEOUT_S = 60.0


class Copies:
    """A context with one process that copies in and two that copy out."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __enter__(self) -> Self:
        self._shared = SharedMemory(create=True, size=self._nbytes)
        context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        for number in range(1 + RECEIVERS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=copy_on_demand, args=(theirs, self._shared.name, self._nbytes, number == 0), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, pipe in self._workers:
            self._answer(pipe)
        return self

    def seconds(self, fresh: bool = False) -> float:
        """Copy in, then copy out, twice at the same time; returns the seconds."""
        return self._turn(self._workers[:1], False) + self._turn(self._workers[1:], fresh)

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
        self._shared.close()
        self._shared.unlink()

    def _turn(self, workers: list[tuple[Any, Connection]], fresh: bool) -> float:
        """From the first one's beginning to the last one's end: the clock is the machine's."""
        start = time.perf_counter() + 0.002
        for _, pipe in workers:
            pipe.send((start, fresh))
        times = [self._answer(pipe) for _, pipe in workers]
        return max(end for _, end in times) - min(began for began, _ in times)

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"a process that copies did not answer within {TIMEOUT_S:g} s")
        return pipe.recv()


def copy_on_demand(orders: Connection, name: str, nbytes: int, inwards: bool) -> None:
    """In a worker's process: copy between own and shared memory at each order, at the time that it gives."""
    shared = SharedMemory(name=name)
    assert shared.buf is not None  # only of memory that was closed
    between = np.frombuffer(shared.buf, dtype=np.uint8, count=nbytes)
    own = np.random.default_rng(os.getpid()).integers(0, 256, nbytes, dtype=np.uint8)
    if inwards:
        np.copyto(between, own)
    orders.send(int(between[:: 1 << 12].sum()))  # every page is mapped here too
    try:
        while True:
            start, fresh = orders.recv()
            while time.perf_counter() < start:
                pass
            began = time.perf_counter()
            if inwards:
                np.copyto(between, own)
            else:
                np.copyto(np.empty_like(own) if fresh else own, between)
            orders.send((began, time.perf_counter()))
    except EOFError:
        del between
        shared.close()
