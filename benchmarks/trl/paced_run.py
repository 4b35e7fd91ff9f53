"""A training run in a process of its own, which works only while it has the turn."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from typing import Self

import psutil

from benchmarks.side_process import QUOTED_LOG, SideFailed

TURN_TIMEOUT_S, FINISH_TIMEOUT_S = 240.0, 120.0


class PacedRun:
    """A context around one run, whose script calls `pacing.Pacing`; leaving it ends the process."""

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str], directory: Path,
                 freeze: bool) -> None:
        """Nothing is started before the context is entered.

        Args:
            command: what to run; a descriptor is added as its last argument.
            environment: variables in place of or beside ours.
            directory: where its log is written.
            freeze: stop the process between turns, also threads that spin. For runs of a single process.
        """
        self.name, self._command, self._environment = name, command, environment
        self._directory, self._freeze = directory, freeze
        self.seconds_to_first_update = 0.0
        self.cpus = 0.0
        """Cores that the process itself kept busy during its last turn, on average."""

    def __enter__(self) -> Self:
        """Start it, and wait until its first update is over."""
        self._directory.mkdir(parents=True, exist_ok=True)
        began, (self._line, theirs) = time.monotonic(), Pipe()
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [*map(str, self._command), str(theirs.fileno())], env={**os.environ, **self._environment},
                stdout=log, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()])
        try:
            self._times()
        except BaseException:
            self.__exit__()
            raise
        self.seconds_to_first_update = time.monotonic() - began
        self._rest()
        return self

    def turn(self, updates: int) -> list[float]:
        """Let it make some updates; returns the seconds of each.

        Raises:
            SideFailed: it ended, or did not answer in time.
        """
        if self._freeze:
            self._process.send_signal(signal.SIGCONT)
        began, cpu_began = time.monotonic(), self._cpu_seconds()
        self._line.send(updates)
        times = self._times()
        self.cpus = (self._cpu_seconds() - cpu_began) / (time.monotonic() - began)
        self._rest()
        return [after - before for before, after in pairwise(times)]

    def finish(self) -> None:
        """Wait for its end, after its last update.

        Raises:
            SideFailed: it did not end well.
        """
        if self._freeze:
            self._process.send_signal(signal.SIGCONT)
        self._line.send(0)
        try:
            code = self._process.wait(FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SideFailed(f"{self.name} did not end within {FINISH_TIMEOUT_S:.0f} s;{self._printed()}") from None
        if code:
            raise SideFailed(f"{self.name} ended with {code};{self._printed()}")

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def _log(self) -> Path:
        return self._directory / "output.log"

    def _times(self) -> list[float]:
        """When the turn's updates ended; the first number is when the turn began."""
        if not self._line.poll(TURN_TIMEOUT_S):
            raise SideFailed(f"{self.name}: no turn within {TURN_TIMEOUT_S:.0f} s;{self._printed()}")
        try:
            times: list[float] = self._line.recv()
        except (EOFError, ConnectionResetError):
            raise SideFailed(f"{self.name} ended with {self._process.wait(10)};{self._printed()}") from None
        return times

    def _cpu_seconds(self) -> float:
        spent = psutil.Process(self._process.pid).cpu_times()
        return float(spent.user + spent.system)

    def _rest(self) -> None:
        if self._freeze:
            self._process.send_signal(signal.SIGSTOP)

    def _printed(self) -> str:
        return f" it printed:\n{self._log.read_text(errors='replace')[-QUOTED_LOG:]}"
