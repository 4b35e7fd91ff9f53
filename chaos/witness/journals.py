"""Journals: files of JSON lines outside the run's directory. Each process appends to its own; lines survive a kill."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

JOURNALS = "RLHF_RAY_CHAOS_JOURNALS"
"""Environment variable of all processes of a run: the directory of its journals."""
WEIGHTS = "weights"
"""Subdirectory of the policy's weights, a file for each digest."""
SERVICE = "reward_service"
"""Name of the reward service's journal."""
SCORED, REFUSED = "scored", "refused"
"""Its events: samples got scores (`samples`, their tokens; `scores`, where they depend on the responses); a prompt gets
none from now on (`prompt`, its first tokens)."""


class Journal:
    """One journal, to which the processes of a worker append in turn. Each names itself in all its lines (`life`)."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._life = f"{os.getpid()} since {time.monotonic_ns()}"

    def add(self, event: str, **fields: Any) -> None:
        """Append a line, with the time in seconds since the machine started: a clock that all processes share and that
        nobody sets."""
        line = {"event": event, "time": time.monotonic(), "life": self._life, **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_journal(directory: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a journal; empty without the file. Incomplete lines, as a killed process leaves them, are
    skipped."""
    path, lines = directory / f"{name}.jsonl", []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
