"""Standard output and error of a run that neither end nor block it when a pipe is closed or not read, the disk is full,
or standard output was closed from the start.

A thread writes to the file descriptor directly: Python's own buffers have locks, which a write that hangs would hold
until the process ends. Output that cannot be written is dropped and counted.

When Python ends, the process waits for that thread after all that prints: the interpreter's own traceback, threads that
are still running, handlers of `atexit`. What is printed after that is written at once.
"""

from __future__ import annotations

import atexit
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

MAX_PENDING_BYTES = 2**20
"""Largest amount of output that waits to be written; further output is dropped."""
DRAIN_S = 2.0
"""How long `drain` waits without any progress."""
PIPE_BYTES = select.PIPE_BUF
"""What fits into a pipe that is ready."""


class NonBlockingStream(io.TextIOBase):
    """Replaces a text stream. No method raises except `fileno`; none blocks except `drain`, which has a deadline."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` as Python gives it: None where the descriptor was closed from the start."""
        self._stream, self._name = stream, getattr(stream, "name", "<closed>")
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._terminal, self._descriptor = False, -1
        self._parts: deque[bytes] = deque()
        self._waiting, self._dropped, self._moved_at = 0, 0, 0.0
        self._change = threading.Condition()
        self._gone = stream is None
        self._ended = False
        self._unread_since: float | None = None
        if stream is not None:
            with suppress(Exception):  # a closed stream
                self._terminal = stream.isatty()
                stream.flush()
            # Others keep the text in memory, or send it elsewhere than to their descriptor, as a notebook does.
            if isinstance(stream, io.TextIOWrapper | NonBlockingStream):
                with suppress(Exception):
                    self._descriptor = os.dup(stream.fileno())
        if self._descriptor >= 0:
            threading.Thread(target=self._work, daemon=True, name=f"output {self._name}").start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._encoding

    @property
    def dropped(self) -> int:
        """Lines that were dropped and not reported yet."""
        return self._dropped

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._terminal

    def writable(self) -> bool:
        """Always true."""
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
        """Queue text for writing. Never raises, and returns at once."""
        if self._descriptor < 0:
            self._write_through(text)
            return len(text)
        data = text.encode(self._encoding, "backslashreplace")
        if self._ended or not self._queue(data):
            self._write_now(data)
        return len(text)

    def flush(self) -> None:
        """Does nothing: the thread writes as soon as it can."""

    def drain(self) -> None:
        """Wait until everything is written, or nothing was written for `DRAIN_S`; not once more if nothing was written
        since."""
        if self._descriptor < 0:
            return
        began = time.monotonic()
        with self._change:
            while self._waiting and not self._gone:
                waited_before = self._unread_since is not None and self._moved_at < self._unread_since
                left_s = max(self._moved_at, began) + DRAIN_S - time.monotonic()
                if waited_before or left_s <= 0:
                    self._unread_since = time.monotonic()
                    return
                self._change.wait(left_s)

    def end(self) -> None:
        """`drain`; what is printed afterwards is written at once, because the thread stops with the interpreter."""
        with suppress(KeyboardInterrupt):
            self.drain()
        with self._change:
            self._ended = True
            self._gone = self._gone or self._waiting > 0  # nothing has read it

    def release(self) -> None:
        """`drain`, then end the thread; nothing can be written afterwards."""
        self.drain()
        with self._change:
            self._gone = True
            self._change.notify_all()

    def _write_through(self, text: str) -> None:
        with suppress(Exception):
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()

    def _queue(self, data: bytes) -> bool:
        """Leave bytes to the thread, or drop them; False once it is too late for that."""
        with self._change:
            if self._ended:
                return False
            if self._gone:
                return True
            if self._waiting + len(data) > MAX_PENDING_BYTES:
                self._dropped += max(1, data.count(b"\n"))
            else:
                self._waiting += len(data)
                self._parts.append(data)
                self._change.notify_all()
        return True

    def _write_now(self, data: bytes) -> None:
        """Write bytes, unless nothing reads them for `DRAIN_S`. Takes no lock: a thread that stopped with the
        interpreter may hold it."""
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        while data and not self._gone:
            try:
                if ready.poll(1000 * DRAIN_S):
                    data = data[os.write(self._descriptor, data[:PIPE_BYTES]):]
                else:
                    self._gone = True
            except BlockingIOError:
                continue
            except OSError:
                self._gone = True

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._parts and not self._gone:
                    self._change.wait()
                if self._gone:
                    os.close(self._descriptor)
                    return
                data = self._parts.popleft()
            written = self._written(data)
            with self._change:
                self._waiting -= len(data)
                self._moved_at = time.monotonic()
                if not written:
                    self._dropped += max(1, data.count(b"\n"))
                elif self._dropped:
                    notice = f"[{self._dropped} lines of output were dropped: nothing read them]\n".encode()
                    self._parts.append(notice)
                    self._waiting, self._dropped = self._waiting + len(notice), 0
                self._change.notify_all()

    def _written(self, data: bytes) -> bool:
        """Write bytes; False where they cannot be written now."""
        while data:
            try:
                data = data[os.write(self._descriptor, data[:PIPE_BYTES]):]
                self._moved_at = time.monotonic()
            except BlockingIOError:  # another process made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EBADF, errno.EIO):  # the reader is gone
                    self._gone = True
                return False
        return True


def non_blocking(stream: TextIO | None) -> TextIO:
    """A `NonBlockingStream` over `stream`, or `stream` itself if it is one."""
    return stream if isinstance(stream, NonBlockingStream) else NonBlockingStream(stream)  # type: ignore[return-value]


def use_non_blocking_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by non-blocking streams, for the rest of the process, which does not end
    before they are written."""
    for number in (0, 1, 2):  # a file that the run opens later must not become its standard output
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = non_blocking(sys.stdout), non_blocking(sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, NonBlockingStream) and stream not in before:
            atexit.register(stream.end)


def drain_output() -> None:
    """Wait until the output is written, before `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, NonBlockingStream):
            stream.drain()
