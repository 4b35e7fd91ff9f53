"""The log of what was injected into a run: a file to which several processes append, and that outlives them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rlhf_ray.files.writing import append_json_lines

INJECTION_LOG = "RLHF_RAY_CHAOS_INJECTION_LOG"
"""Environment variable of all processes of a run: the path of its injection log."""


class InjectionLog:
    """JSON lines, flushed one by one. The field `event` is one of:

    loop: the training loop begins (pid, step), in a new driver or after the learners were restarted.
    injected: a fault is injected (fault number, role, rank, pid, state).
    confirmed: the victim is dead or stopped, or has failed as ordered (fault number, state).
    recovered: the reward service answered correctly again, an environment answered the call in which it had failed, a
        learner applied a step again, or a partitioned node returned and its processes ended (fault number).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, event: str, **fields: Any) -> None:
        """Append a line, with the time in seconds since 1970."""
        append_json_lines(self.path, [{"event": event, "time": time.time(), **fields}])

    def read(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines so far, of one event or all. Incomplete lines, as a killed driver leaves them, are skipped."""
        lines = []
        for text in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return [line for line in lines if event in (None, line["event"])]

    def injected(self) -> set[int]:
        """Numbers of the faults that were injected."""
        return {line["fault"] for line in self.read("injected")}
