"""What a process of user code and the one that started it send each other: frames of a length and a body. Requests are
pickles, answers are JSON, so that nothing from the process is ever unpickled. Imports the standard library alone."""

from __future__ import annotations

import json
import pickle
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

HEADER = struct.Struct("!Q")
"""Length of the frame that follows, in bytes."""


def print_by_lines() -> None:
    """Pass on what is printed line by line: the output is a pipe, where it would wait for more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def receive(channel: socket.socket) -> Any:
    """The next request; None when the socket is closed."""
    header = _exactly(channel, HEADER.size)
    body = _exactly(channel, HEADER.unpack(header)[0]) if header else None
    return pickle.loads(body) if body else None  # noqa: S301 - from the process that started this one


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send an answer; NaN and infinity are written as Python's JSON does."""
    body = json.dumps(message).encode()
    channel.sendall(HEADER.pack(len(body)) + body)


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
