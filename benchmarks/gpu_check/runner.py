"""Runs a check in a process of its own, and hands over each row as it comes.

So a crash, a damaged CUDA context, memory that is not given back, or a hang costs no other check its rows.
"""

import asyncio
import inspect
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import Check
from benchmarks.gpu_check.rows import Row, failed, not_run
from rlhf_ray.cli.library_logging import quiet_libraries

PATIENCE, LEAST_S = 6.0, 120.0
"""A check may take this multiple of what it is expected to, and at least so long besides."""
LEAVING_S = 30.0
"""For a process to end after its last row."""


@dataclass(frozen=True)
class Place:
    """What a check is given."""

    gpus: tuple[str, ...]
    """Names of the GPUs; empty in a rehearsal on the CPU, whose sizes are tiny."""
    directory: Path
    """An empty directory, removed afterwards."""

    @property
    def gpu(self) -> bool:
        """Whether there is one."""
        return bool(self.gpus)

    @property
    def device(self) -> str:
        """As torch names it."""
        return "cuda" if self.gpus else "cpu"


def rows_of(check: Check, gpus: tuple[str, ...], log: Path, left_s: float) -> Iterator[Row]:
    """Run a check, its output appended to `log`. Errors are rows.

    Args:
        left_s: seconds left to the whole command. A check that is expected to take longer is not begun, and one that
            does is ended.
    """
    if check.seconds > left_s:
        yield not_run(check.name, f"it is expected to take {check.seconds:g} s, and {max(0.0, left_s):.0f} s were left "
                                  "(--seconds)")
        return
    deadline = time.monotonic() + min(left_s, LEAST_S + PATIENCE * check.seconds)
    context = multiprocessing.get_context("spawn")  # a fork would not have a CUDA context of its own
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-gpu-check-", ignore_cleanup_errors=True) as directory:
        process = context.Process(target=_child, args=(check, Place(gpus, Path(directory)), log, sender))
        process.start()
        sender.close()
        try:
            if (yield from _received(check, receiver, deadline)):
                yield from _ended(check, process)
        finally:
            _kill(process)


def _received(check: Check, receiver: Connection, deadline: float) -> Generator[Row, None, bool]:
    """Rows until the other end is closed; returns False if the deadline came first."""
    began = time.monotonic()
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            yield receiver.recv()
        except EOFError:
            return True
    yield failed(check.name, f"not done within {deadline - began:.0f} s; its processes were ended")
    return False


def _ended(check: Check, process: BaseProcess) -> Iterator[Row]:
    process.join(LEAVING_S)
    if process.exitcode:
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
        yield failed(check.name, f"its process ended with {how}")


def _kill(process: BaseProcess) -> None:
    """End the process and those that it started, which share its session unless they left it."""
    if process.pid is None:
        return
    if process.is_alive():
        process.terminate()  # SystemExit in the child: clusters that it started end with it
        process.join(LEAVING_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(LEAVING_S)


def _child(check: Check, place: Place, log: Path, sender: Connection) -> None:
    """The process of a check."""
    os.setsid()
    signal.signal(signal.SIGTERM, _leave)
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(f"== {check.part} {check.name}", flush=True)
    if not place.gpu:
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    quiet_libraries()
    try:
        _send_all(getattr(import_module(f"{check.package}.{check.part}"), check.name), place, sender.send)
    except Exception as error:
        traceback.print_exc()
        sender.send(failed(check.name, error))
    finally:
        sender.close()


def _send_all(check: Callable[[Place], Any], place: Place, send: Callable[[Row], None]) -> None:
    """Send the rows of a generator, which may be asynchronous."""
    async def consume() -> None:
        async for row in check(place):
            send(row)

    if inspect.isasyncgenfunction(check):
        asyncio.run(consume())
        return
    for row in check(place):
        send(row)


def _leave(*_: Any) -> None:
    raise SystemExit("ended by launch/gpu_check")
