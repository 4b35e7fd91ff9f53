"""One side of a comparison in a separate process: built once, then asked for one turn after another."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, Protocol, Self, TypeVar
from unittest.mock import patch

from rlhf_ray.cluster.worker_environment import KEEP_MEMORY

START_TIMEOUT_S = 300.0
TURN_TIMEOUT_S = 120.0
QUOTED_LOG = 2_000
"""Characters of a failed side's output to show."""


class Side(Protocol):
    """One way to do the work. Built from the directory of the workload; the building is not timed."""

    def run(self) -> float:
        """Do the work once, and say how much it was. Timed."""
        ...

    def proof(self) -> list[float]:
        """Numbers about the last turn's result that the other side must arrive at too. Not timed."""
        ...


@dataclass(frozen=True)
class Turn:
    """The work done once."""

    amount: float
    seconds: float
    cpu_seconds: float
    """CPU time of all threads of the side's process."""
    proof: list[float]


class SideFailed(Exception):
    """A side failed or did not answer; quotes the end of what it printed."""


class SideProcess:
    """A context in which a side runs; leaving it ends the process."""

    def __init__(self, name: str, build: Callable[[Path], Side], directory: Path) -> None:
        self._name, self._build, self._directory = name, build, directory

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        handle, log = tempfile.mkstemp(prefix="side-", suffix=".log", dir=self._directory)
        os.close(handle)
        self._log = Path(log)
        self._process = context.Process(
            target=serve, args=(self._build, self._directory, self._log, theirs), daemon=True)
        with patch.dict(os.environ, KEEP_MEMORY):  # whichever side it is: memory is no part of what is compared
            self._process.start()
        theirs.close()
        try:
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def turn(self, timeout_s: float = TURN_TIMEOUT_S) -> Turn:
        """Do the work once.

        Raises:
            SideFailed: it failed, or took longer than `timeout_s`.
        """
        with suppress(BrokenPipeError):  # its process has ended, which reading the answer will say
            self._pipe.send("turn")
        return self._answer(timeout_s)

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the side reads the end of its orders
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise SideFailed(f"{self._name}: no answer within {timeout_s:.0f} s; it printed:\n{self._printed()}")
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            raise SideFailed(f"{self._name}: its process ended (exit code {self._process.exitcode}); it printed:\n"
                             f"{self._printed()}") from None
        if isinstance(answer, str):
            raise SideFailed(f"{self._name}: {answer}\nIt printed:\n{self._printed()}")
        return answer

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")[-QUOTED_LOG:]


def serve(build: Callable[[Path], Side], directory: Path, log: Path, orders: Connection) -> None:
    """In the side's process: build it, then take a turn at each order until there are no more."""
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        side = build(directory)
        orders.send(None)
        while True:
            orders.recv()
            orders.send(take_turn(side))
    except EOFError:
        return
    except Exception:
        sys.stdout.flush()
        orders.send(traceback.format_exc())


def take_turn(side: Side) -> Turn:
    """Time one run of a side in this process."""
    began, cpu_began = time.perf_counter(), time.process_time()
    amount = side.run()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Turn(amount, seconds, cpu_seconds, side.proof())


P = ParamSpec("P")
T = TypeVar("T")


def run_in_process(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call `work` in a new process; returns or raises what it does. The benchmarks' own process stays small."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments, **named).result()
