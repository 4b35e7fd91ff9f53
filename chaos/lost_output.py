"""Breaks the output of this process, as when the reader of a pipe ends."""

from __future__ import annotations

import os
from contextlib import suppress

DESCRIPTORS = "/proc/self/fd"


def break_output() -> None:
    """Replace every descriptor of this process that writes where its standard output does, by a pipe without a
    reader."""
    reader, writer = os.pipe()
    os.close(reader)
    place = os.readlink(f"{DESCRIPTORS}/1")
    for number in map(int, os.listdir(DESCRIPTORS)):
        with suppress(OSError):  # the descriptor of the listing is closed by now
            if number != writer and os.readlink(f"{DESCRIPTORS}/{number}") == place:
                os.dup2(writer, number)
    os.close(writer)
