"""What any publication to two generators on one node with vLLM's CPU kernels must do, in separate processes.

The learner's process copies its weights into memory that all processes share. Then two generators' processes, at the
same time, copy them out into private memory, and vLLM packs each matrix for its kernels, by the function with which it
does so when it loads a model. Each copy is one `memcpy` in one piece; all work is on one thread of each process. All
memory was written to before: no copy waits for the kernel to find and clear a page. `fresh=True` copies out into pages
that are new each time, as a process that allocates its weights again does.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from rlhf_ray.cluster.worker_environment import KEEP_MEMORY

RECEIVERS = 2
TIMEOUT_S = 60.0
CACHE_LINE = 64
"""Bytes."""


class Seconds(NamedTuple):
    """Of one bare publication."""

    copies: float
    packing: float


class BarePublication:
    """A context with one process that copies in and two that copy out and pack."""

    def __init__(self, nbytes: int, matrices: Sequence[tuple[int, int]]) -> None:
        """Of so many bytes, of which float32 matrices with so many rows and columns are packed."""
        self._nbytes, self._matrices = nbytes, matrices

    def __enter__(self) -> Self:
        self._shared = SharedMemory(create=True, size=self._nbytes)
        context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        for number in range(1 + RECEIVERS):
            ours, theirs = context.Pipe()
            packed = self._matrices if number else []
            process = context.Process(
                target=work_on_demand, args=(theirs, self._shared.name, self._nbytes, packed), daemon=True)
            with patch.dict(os.environ, KEEP_MEMORY):
                process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, pipe in self._workers:
            self._answer(pipe)
        return self

    def seconds(self, fresh: bool = False) -> Seconds:
        """Copy in, then copy out, twice at the same time, then pack, twice at the same time."""
        copied_in = self._turn(self._workers[:1], "copy")
        copied_out = self._turn(self._workers[1:], "copy into new pages" if fresh else "copy")
        return Seconds(copied_in + copied_out, self._turn(self._workers[1:], "pack"))

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
        self._shared.close()
        self._shared.unlink()

    def _turn(self, workers: list[tuple[Any, Connection]], order: str) -> float:
        """From the first one's beginning to the last one's end: the clock is the machine's."""
        start = time.perf_counter() + 0.002
        for _, pipe in workers:
            pipe.send((start, order))
        times = [self._answer(pipe) for _, pipe in workers]
        return max(end for _, end in times) - min(began for began, _ in times)

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"a process of the bare publication did not answer within {TIMEOUT_S:g} s")
        return pipe.recv()


def work_on_demand(orders: Connection, name: str, nbytes: int, packed: Sequence[tuple[int, int]]) -> None:
    """In a worker's process: obey each order at the time that it gives; the one that packs nothing copies inwards."""
    torch.set_num_threads(1)
    shared = SharedMemory(name=name)
    assert shared.buf is not None  # only of memory that was closed
    between = np.frombuffer(shared.buf, dtype=np.uint8, count=nbytes)
    own = np.random.default_rng(os.getpid()).integers(0, 256, nbytes, dtype=np.uint8)
    layers = layers_of(packed)
    if packed:
        pack(layers)
    else:
        np.copyto(between, own)
    orders.send(int(between[:: 1 << 12].sum()))  # every page is mapped here too
    try:
        while True:
            start, order = orders.recv()
            while time.perf_counter() < start:
                pass
            began = time.perf_counter()
            if order == "pack":
                pack(layers)
            elif not packed:
                np.copyto(between, own)
            else:
                np.copyto(own if order == "copy" else np.empty_like(own), between)
            orders.send((began, time.perf_counter()))
    except EOFError:
        del between
        shared.close()


def layers_of(shapes: Sequence[tuple[int, int]]) -> list[nn.Module]:
    """Linear layers with random float32 weights. After each row is a gap of a cache line: packing reads down columns,
    and is faster where rows do not lie a power of two apart."""
    layers: list[nn.Module] = []
    for rows, columns in shapes:
        layer = nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(torch.rand(rows, columns + CACHE_LINE // 4)[:, :columns], requires_grad=False)
        layers.append(layer)
    return layers


def pack(layers: Sequence[nn.Module]) -> None:
    """As vLLM does after loading a model."""
    if layers:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in layers:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
