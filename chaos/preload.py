"""A small library that is preloaded into a driver and its workers (preloaded.c): it shifts the driver's clock, and
makes writes to chosen files fail as on a full disk, or take long. It needs a C compiler, and no privilege.

What it does is in a file that the processes map. It stops by itself after a time, also when this program has died.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Self

VARIABLE = "RLHF_RAY_CHAOS_PRELOAD"
"""Environment variable of all processes of a driver: the path of the file that they map."""
LAYOUT = struct.Struct("6q464s")
"""`struct control` of preloaded.c."""
FULL, SLOW = 1, 2
HITS = struct.Struct("q")
HITS_AT = 5 * HITS.size
SOURCE = Path(__file__).with_name("preloaded.c")
COMPILE_S = 60.0


def environment() -> dict[str, str]:
    """Variables with which a driver and its workers load the library, which is compiled at the first call.

    Raises:
        subprocess.CalledProcessError, OSError: it cannot be compiled.
    """
    handle, control = tempfile.mkstemp(prefix="preload-")
    os.write(handle, LAYOUT.pack(0, 0, 0, 0, 0, 0, b""))
    os.close(handle)
    # Ray removes LD_PRELOAD from its workers' environment unless it is told not to.
    return {"LD_PRELOAD": str(_library()), "RAY_LD_PRELOAD_ON_WORKERS": "1", VARIABLE: control}


@cache
def _library() -> Path:
    library = Path(tempfile.mkdtemp(prefix="preload-"), "preloaded.so")
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True,
                   timeout=COMPILE_S)
    return library


class Preload:
    """The library in the processes of a driver, as its file controls it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_this_process(cls) -> Self:
        """The one that this process was started with."""
        return cls(Path(os.environ[VARIABLE]))

    @property
    def hits(self) -> int:
        """Number of calls that failed or were delayed since the last change."""
        return int(HITS.unpack_from(self.path.read_bytes(), HITS_AT)[0])

    def shift_clock(self, pid: int, seconds: int, for_s: float) -> None:
        """Shift a process's wall clock for a time. Its monotonic clocks do not change."""
        self._write(for_s, pid=pid, shift_s=seconds)

    def fill_disk(self, pattern: str, for_s: float) -> None:
        """Let writes to files whose path matches the pattern fail for a time, as on a full disk."""
        self._write(for_s, action=FULL, pattern=pattern)

    def slow_disk(self, pattern: str, delay_s: float, for_s: float) -> None:
        """Delay every write and flush of files whose path matches the pattern for a time."""
        self._write(for_s, action=SLOW, pattern=pattern, delay_s=delay_s)

    def stop(self) -> None:
        """Do nothing from now on. The number of hits stays."""
        hits = self.hits
        self._write(0.0, hits=hits)

    def _write(self, for_s: float, pid: int = 0, shift_s: int = 0, action: int = 0, pattern: str = "",
               delay_s: float = 0.0, hits: int = 0) -> None:
        until = time.monotonic_ns() + int(for_s * 1e9) if for_s else 0
        record = LAYOUT.pack(until, pid, shift_s * 10**9, action, int(delay_s * 1e9), hits, pattern.encode())
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), LAYOUT.size) as shared:
            shared[:8] = bytes(8)  # off, until the rest is written
            shared[8:] = record[8:]
            shared[:8] = record[:8]
