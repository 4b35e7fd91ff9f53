"""What was done to a run, line by line as it happens: a file that the driver appends to, and that outlives it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rlhf_ray.files.writing import append_json_lines

STRIKES = "RLHF_RAY_CHAOS_STRIKES"
"""Variable in the environment of all processes of a run: the file of its strikes."""


class Strikes:
    """JSON lines, flushed one by one. Kinds of line, by `event`:

    loop: a loop begins (pid, step), of a driver that started or whose learners were built again.
    struck: a fault is injected (fault number, role, rank, pid, state).
    confirmed: the victim is seen dead or stopped, or has failed as ordered (fault number, state).
    recovered: a reward service answered well again, a learner applied a step again, what was cut off returned and ended
        (fault number).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, event: str, **told: Any) -> None:
        """Append a line, with the time of day in seconds since 1970."""
        append_json_lines(self.path, [{"event": event, "time": time.time(), **told}])

    def read(self, event: str | None = None) -> list[dict[str, Any]]:
        """Lines so far, of one kind or all; the last may be torn by the driver's death."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [told for told in found if event in (None, told["event"])]

    def struck(self) -> set[int]:
        """Numbers of the faults that were injected."""
        return {told["fault"] for told in self.read("struck")}
