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

ENVIRONMENT = "environment"
"""Begins the names of the journals of environments, one for each process."""
RESET, ANSWERED, STALLED = "reset", "answered", "stalled"
"""Their events: an episode begins at a place (`mark`); a turn is answered (`mark`: the place after it; `done`: whether
the episode is; `role` of the answer); the next turn is not answered until a deadline passes. Each names the
`environment`."""
RECEIVED, RETURNED = "received", "returned"
"""Further events, of agents: the policy has answered at a place (`mark`: before the turn; `text`: what it wrote,
legibly); the agent has returned. All of an agent name their `session`."""


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


def read_environments(directory: Path) -> list[dict[str, Any]]:
    """The lines of the journals of all environments."""
    return [line for path in sorted(directory.glob(f"{ENVIRONMENT}_*.jsonl"))
            for line in read_journal(directory, path.stem)]


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
