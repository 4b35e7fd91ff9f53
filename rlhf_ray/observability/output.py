"""What a run prints, so that printing can neither end nor hold up the run: a pipe that is closed or that nobody reads,
a full disk, a standard output that was closed from the start.

Lines are written by a thread of their own, straight to the file descriptor: Python's own buffers have locks, which a
write that hangs would keep until the end of the process. What finds no place is dropped, and counted.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TextIO

MOST_BYTES = 2**20
"""That wait to be written; what comes then is dropped."""
DRAIN_S = 2.0
"""At the end of a stage, for what waits; as long as bytes are taken, more."""


class SteadyStream(io.TextIOBase):
    """Takes the place of a text stream. No method but `fileno` raises, and none waits but `drain`, which has an end."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` as Python gives it: None where the descriptor was closed from the start."""
        self._stream, self._name = stream, getattr(stream, "name", "<closed>")
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._terminal, self._descriptor = False, -1
        self._parts: deque[bytes] = deque()
        self._waiting, self._dropped, self._moved_at = 0, 0, 0.0
        self._change = threading.Condition()
        self._gone = stream is None
        if stream is not None:
            with suppress(Exception):  # a closed stream
                self._terminal = stream.isatty()
                stream.flush()
            with suppress(Exception):  # no file: text kept in memory
                self._descriptor = os.dup(stream.fileno())
        if self._descriptor >= 0:
            threading.Thread(target=self._work, daemon=True, name=f"output {self._name}").start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As of the stream."""
        return self._encoding

    @property
    def dropped(self) -> int:
        """Lines that found no place and were not told of yet."""
        return self._dropped

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._terminal

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The stream's own descriptor.

        Raises:
            OSError: it has none.
        """
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Have text written. It never raises, and returns at once."""
        if self._descriptor < 0:
            self._write_through(text)
            return len(text)
        data = text.encode(self._encoding, "backslashreplace")
        with self._change:
            if self._gone:
                return len(text)
            if self._waiting + len(data) > MOST_BYTES:
                self._dropped += max(1, text.count("\n"))
            else:
                self._waiting += len(data)
                self._parts.append(data)
                self._change.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: what was given is on its way."""

    def drain(self) -> None:
        """Wait until all is written, or nothing has been taken for `DRAIN_S`."""
        if self._descriptor < 0:
            return
        began = time.monotonic()
        with self._change:
            while self._waiting and not self._gone:
                left_s = max(self._moved_at, began) + DRAIN_S - time.monotonic()
                if left_s <= 0:
                    return
                self._change.wait(left_s)

    def _write_through(self, text: str) -> None:
        with suppress(Exception):
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()

    def _work(self) -> None:
        while not self._gone:
            with self._change:
                while not self._parts:
                    self._change.wait()
                data = self._parts.popleft()
            written = self._written(data)
            with self._change:
                self._waiting -= len(data)
                self._moved_at = time.monotonic()
                if not written:
                    self._dropped += max(1, data.count(b"\n"))
                elif self._dropped:
                    said = f"[{self._dropped} lines of output were not shown: nothing took them]\n".encode()
                    self._parts.append(said)
                    self._waiting, self._dropped = self._waiting + len(said), 0
                self._change.notify_all()

    def _written(self, data: bytes) -> bool:
        """Write bytes; False where there is no place for them now."""
        while data:
            try:
                data = data[os.write(self._descriptor, data):]
            except BlockingIOError:  # somebody made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EBADF, errno.EIO):  # nobody will read here again
                    self._gone = True
                return False
        return True


def steady(stream: TextIO | None) -> TextIO:
    """A stream that never raises and never waits, over `stream`; itself where it is one."""
    return stream if isinstance(stream, SteadyStream) else SteadyStream(stream)  # type: ignore[return-value]


def steady_output() -> None:
    """From now on all that this process prints, logs or warns of goes to steady streams. For the process of a run,
    which ends with them."""
    for number in (0, 1, 2):  # a file that the run opens must not become its standard output
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = steady(sys.stdout), steady(sys.stderr)


def drain_output() -> None:
    """At the end of the process: give what was printed its time."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, SteadyStream):
            stream.drain()
