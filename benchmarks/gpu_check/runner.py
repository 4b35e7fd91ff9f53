"""Runs a check in a process of its own, and hands over each row as it comes.

So a crash, a damaged CUDA context, memory that is not given back, or a hang costs no other check its rows. A check of
several measurements (`in_turn`) makes them in one process, since starting one takes ten seconds on a GPU; when it ends
early, only the measurement under way is lost, and a new process makes those after it.
"""

import asyncio
import inspect
import math
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import Check
from benchmarks.gpu_check.rows import Agenda, Begun, Message, Row, failed, not_run
from rlhf_ray.cli.library_logging import quiet_libraries

PATIENCE, LEAST_S = 6.0, 120.0
"""A check may take this multiple of what it is expected to, and at least so long besides."""
HANGING, HANGING_S = 3.0, 20.0
"""The same of one measurement of several on a GPU."""
LEAVING_S = 10.0
"""For a process to end after its last row."""
BEGINNING_S = 20.0
"""What a new process takes before it measures anything; not begun with less time."""
LEFT_BEHIND = 75
"""Exit code of a process that is damaged, or holds memory that it cannot free, and leaves the rest to another."""


@dataclass(frozen=True)
class Place:
    """What a check is given."""

    gpus: tuple[str, ...]
    """Names of the GPUs; empty in a rehearsal on the CPU, whose sizes are tiny."""
    directory: Path
    """An empty directory, removed afterwards."""
    results: Path | None = None
    """Where files are kept that rows refer to; `directory` if None."""
    deadline: float = math.inf
    """When the process is ended, by `time.monotonic`."""
    ahead: tuple[str, ...] | None = None
    """Measurements that an earlier process of this check did not come to; None in the first one."""
    only: tuple[str, ...] = ()
    """Of several measurements, those whose name has one of these texts in it; all if empty."""

    @property
    def gpu(self) -> bool:
        """Whether there is one."""
        return bool(self.gpus)

    @property
    def device(self) -> str:
        """As torch names it."""
        return "cuda" if self.gpus else "cpu"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Measurement:
    """One of several of a check."""

    name: str
    seconds: float
    """What it is expected to take on an H200; a GPU that has less time left does not begin it."""
    rows: Callable[[], Iterator[Row]]


def in_turn(place: Place, measurements: Sequence[Measurement], clean: Callable[[], None]) -> Iterator[Message]:
    """Make measurements one after the other in this process. An error costs only the remaining rows of its own.

    Args:
        clean: frees what a measurement leaves behind; raises an error if that is not possible, and another process
            continues.
    """
    asked = [one for one in measurements if not place.only or any(text in one.name for text in place.only)]
    ahead = [one for one in asked if place.ahead is None or one.name in place.ahead]
    yield Agenda(tuple(one.name for one in ahead))
    for one in ahead:
        if one.seconds > place.left_s:
            yield not_run(one.name, f"it is expected to take {one.seconds:g} s, and {place.left_s:.0f} s were left")
            continue
        yield Begun(one.name, one.seconds)
        print(f"-- {one.name}", flush=True)
        try:
            yield from one.rows()
        except Exception as error:
            traceback.print_exc()
            yield failed(one.name, error)
        try:
            clean()
        except Exception:
            traceback.print_exc()
            raise SystemExit(LEFT_BEHIND) from None


@dataclass
class Progress:
    """How far a check is."""

    check: Check
    end: float
    """When it is ended, by `time.monotonic`."""
    current: str
    """What is measured now."""
    by_clock: bool = False
    """Whether `end` is that of the whole command, so that it says nothing about the check."""
    ahead: tuple[str, ...] | None = None
    """Measurements behind it; None before a process has named them."""
    only: tuple[str, ...] = ()
    """As of `Place`."""


def rows_of(check: Check, gpus: tuple[str, ...], log: Path, left_s: float, only: tuple[str, ...] = ()
            ) -> Iterator[Row]:
    """Run a check, its output appended to `log`. Errors are rows.

    Args:
        left_s: seconds left to the whole command. A check that is expected to take longer is not begun, unless it is
            one of several measurements; one that does is ended.
        only: as of `Place`.
    """
    needed = check.seconds if check.least_s is None else check.least_s
    if needed > left_s:
        yield not_run(check.name, f"it is expected to take {needed:g} s, and {max(0.0, left_s):.0f} s were left "
                                  "(--seconds)")
        return
    patience = LEAST_S + PATIENCE * check.seconds
    progress = Progress(check, time.monotonic() + min(left_s, patience), check.name, left_s < patience,
                        only=only)
    while not (yield from _one_process(progress, gpus, log)) and progress.ahead:
        if progress.end - time.monotonic() < BEGINNING_S:
            yield from (not_run(name, "no time was left") for name in progress.ahead)
            break


def _one_process(progress: Progress, gpus: tuple[str, ...], log: Path) -> Generator[Row, None, bool]:
    """Rows of one process; returns whether it came to its end."""
    context = multiprocessing.get_context("spawn")  # a fork would not have a CUDA context of its own
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-gpu-check-", ignore_cleanup_errors=True) as directory:
        place = Place(gpus, Path(directory), log.parent, progress.end, progress.ahead, progress.only)
        process = context.Process(target=_child, args=(progress.check, place, log, sender))
        process.start()
        sender.close()
        try:
            return (yield from _received(progress, receiver, bool(gpus))) and (yield from _ended(progress, process))
        finally:
            _kill(process)


def _received(progress: Progress, receiver: Connection, gpu: bool) -> Generator[Row, None, bool]:
    """Rows until the other end is closed; returns False if a deadline came first."""
    began = time.monotonic()
    end = progress.end
    while receiver.poll(max(0.0, end - time.monotonic())):
        try:
            message = receiver.recv()
        except EOFError:
            return True
        if isinstance(message, Agenda):
            progress.ahead = message.names
        elif isinstance(message, Begun):
            assert progress.ahead is not None
            progress.current = message.name
            progress.ahead = progress.ahead[progress.ahead.index(message.name) + 1 :]
            began = time.monotonic()
            if gpu:
                end = min(progress.end, began + HANGING_S + HANGING * message.seconds)
        else:
            yield message
    seconds = f"{time.monotonic() - began:.0f} s"
    if progress.by_clock and end == progress.end:
        yield not_run(progress.current, f"not done within {seconds}, when no time was left")
    else:
        yield failed(progress.current, f"not done within {seconds}; its processes were ended")
    return False


def _ended(progress: Progress, process: BaseProcess) -> Generator[Row, None, bool]:
    process.join(LEAVING_S)
    if process.exitcode and process.exitcode != LEFT_BEHIND:
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
        yield failed(progress.current, f"its process ended with {how}")
    return not process.exitcode


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


def _send_all(check: Callable[[Place], Any], place: Place, send: Callable[[Message], None]) -> None:
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
