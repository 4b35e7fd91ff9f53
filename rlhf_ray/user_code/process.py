"""A process of user code that can be killed with everything it has started, whose output is bounded.

A blocked call cannot be interrupted inside one process (nothing stops a C function), so deadlines are enforced by
killing the process. It runs below a keeper (`keeper.py`), which ends everything that it has started.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rlhf_ray.errors import RLHFError
from rlhf_ray.user_code.frames import HEADER

SHUTDOWN_GRACE_S = 0.5
"""Time for an idle process to end before it is killed."""
OUTPUT_BYTES = 1 << 20
"""What may be printed in each call; the rest is dropped, because the worker's log has no limit."""
LAST_ANSWER_S = 0.2
"""Time to read what a process answered before it ended."""
MARK = "RLHF_RAY_USER_PROCESS"
"""Variable of the environment by which what a process has started is found when its keeper was killed."""
GONE_S = 5.0
"""Longest wait for a killed process to disappear."""


class AnswerTooLong(Exception):
    """An answer is longer than the caller reads."""

    def __init__(self, size: int) -> None:
        super().__init__(f"answered with {size} bytes")


class UserProcess:
    """One process of user code, from its start to its end. It is not started again: each start takes a new one."""

    def __init__(self, who: str, printed: PrintedLines) -> None:
        """
        Args:
            who: the user's code as the subject of messages.
            printed: takes what it prints.
        """
        self._who, self._printed = who, printed
        self._popen: subprocess.Popen[bytes] | None = None
        self._mark = f"{MARK}={uuid.uuid4().hex}"

    @property
    def pid(self) -> int:
        """Id of its keeper."""
        assert self._popen is not None
        return self._popen.pid

    async def start(self, module: str, failure: type[RLHFError]) -> None:
        """Run the `main` of a module with the number of a socket.

        Raises:
            failure: no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", "rlhf_ray.user_code.keeper", module, str(theirs.fileno()),
                     str(os.getpid())],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, start_new_session=True, env=_environment(self._mark),
                )
            except OSError as error:
                self._writer.close()
                raise failure(f"{self._who}: no process can be started for it: {error}. Free memory or raise the "
                              "limit of processes (ulimit -u)") from error
        self._output = BoundedOutput(self._popen.stdout, self._printed)
        self._watch()

    def _watch(self) -> None:
        """Close the connection when the process ends: what it has started may keep the other end open."""
        assert self._popen is not None
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            loop.call_later(LAST_ANSWER_S, self._writer.close)

        with suppress(OSError):  # it has ended
            descriptor = os.pidfd_open(self._popen.pid)
            loop.add_reader(descriptor, ended)

    def send(self, message: Any) -> None:
        """Send a request, which the process unpickles. It may print again as much as a call may. Nothing is sent to a
        process that has closed its end: `receive` says so."""
        self._output.left = OUTPUT_BYTES
        body = pickle.dumps(message)
        if not self._writer.is_closing():  # uvloop, which Ray uses, would raise an error
            self._writer.write(HEADER.pack(len(body)) + body)

    async def drain(self) -> None:
        """Wait until the requests are mostly sent."""
        await self._writer.drain()

    async def receive(self, longest: int) -> bytes:
        """The next answer.

        Raises:
            AnswerTooLong: it has more than `longest` bytes.
            asyncio.IncompleteReadError, ConnectionError: the process ended, or closed its socket.
        """
        size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
        if size > longest:
            raise AnswerTooLong(size)
        return await self._reader.readexactly(size)

    async def end(self, *, idle: bool) -> None:
        """End the process: an idle one by closing its socket, a busy one by killing it."""
        if self._popen is None:
            return
        if idle:
            self._writer.close()
            await self._gone(SHUTDOWN_GRACE_S)
        await self.kill()
        await asyncio.to_thread(self._output.wait, SHUTDOWN_GRACE_S)

    async def kill(self) -> None:
        """Kill it and all that it has started."""
        if self._popen is None:
            return
        for signals in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
            if self._popen.poll() is None:
                for each in signals:  # its keeper kills it, and all that it has started
                    with suppress(ProcessLookupError):
                        os.kill(self._popen.pid, each)
                await self._gone(GONE_S)
        if self._popen.poll() == -signal.SIGKILL:  # perhaps its keeper was killed itself
            await asyncio.to_thread(_kill_marked, self._mark)
        self._writer.close()

    async def ending(self) -> str:
        """How it ended that has closed its socket, as the end of a sentence."""
        await self._gone(GONE_S)
        return _ending(self._popen.poll() if self._popen else None)

    async def _gone(self, patience_s: float) -> None:
        """Wait for the process to end. (uvloop, which Ray uses, has no subprocesses off the main thread.)"""
        deadline = time.monotonic() + patience_s
        while self._popen and self._popen.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def _environment(mark: str) -> dict[str, str]:
    """The worker's and a mark, without the variable by which a program `python FILE` that the user's code starts would
    not find the modules beside it."""
    name, _, value = mark.partition("=")
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}, name: value}


class PrintedLines:
    """What user code printed, line by line: copied to this process's output, and kept until it is taken, up to
    `OUTPUT_BYTES`; later lines are only copied then."""

    def __init__(self, name: str, who: str) -> None:
        """
        Args:
            name: begins each line.
            who: the user's code as the subject of messages.
        """
        self._begin, self.who = f"{name}: " if name else "", who
        self._lines: list[str] = []
        self._size = 0
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """Add a line without its end."""
        line = self._begin + line
        with self._lock:
            if self._size < OUTPUT_BYTES:
                self._lines.append(line)
                self._size += len(line)
        with suppress(OSError, ValueError):  # this process's output may be closed
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def take(self) -> list[str]:
        """The lines that were kept; they are no longer kept."""
        with self._lock:
            lines = self._lines
            self._lines, self._size = [], 0
        return lines


class BoundedOutput:
    """Reads what a process prints, and passes on as much as `left` allows: a full pipe would hold the process up. It
    ends when no process has the pipe any more."""

    def __init__(self, pipe: IO[bytes] | None, printed: PrintedLines) -> None:
        self.left = OUTPUT_BYTES
        """Bytes that are passed on before others are dropped; negative when some were."""
        self._printed, self._pending = printed, b""
        self._thread = threading.Thread(target=self._copy, args=(pipe,), name="output of user code", daemon=True)
        if pipe is not None:
            self._thread.start()

    def wait(self, patience_s: float) -> None:
        """Wait until everything is read that an ended process printed."""
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                over = len(part) > self.left >= 0
                *lines, self._pending = (self._pending + part[:max(self.left, 0)]).split(b"\n")
                self.left = -1 if over else self.left - len(part)
                for line in lines:
                    self._add(line)
                if over:
                    self._end_line()
                    self._printed.add(f"({self._printed.who} prints more than {OUTPUT_BYTES} bytes in a call; the rest "
                                      "is dropped)")
            self._end_line()

    def _end_line(self) -> None:
        if self._pending:
            self._add(self._pending)
            self._pending = b""

    def _add(self, line: bytes) -> None:
        self._printed.add(line.decode("utf-8", "replace").rstrip("\r"))


def _kill_marked(mark: str) -> None:
    """Kill the processes that have inherited a variable of the environment."""
    for each in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in each.read_bytes():
                os.kill(int(each.parent.name), signal.SIGKILL)


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
