"""Lost workers and failed background tasks: shown to the user, counted for the metrics, recorded in faults.jsonl."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_ray.errors import DataError, WorkerError, WorkerLost
from rlhf_ray.files.writer_thread import FileThread
from rlhf_ray.files.writing import append_json_lines
from rlhf_ray.observability.background_task import describe_failure
from rlhf_ray.observability.owner_record import Term

STARTED_AGAIN = "RLHF_RAY_STARTED_AGAIN"
"""Environment variable of a run that was restarted after its process died: how that process ended, as JSON."""
UNKNOWN = {**dict.fromkeys(("rank", "incarnation", "pid", "method", "call_age_s", "detection_s", "recovery_s")),
           "redispatched": 0}
"""What `FaultLog.write` records for the keys that an event does not have."""


class FaultLog:
    """One line per lost worker, written when it is back, or will not come back. A resumed run appends.

    Args:
        path: file of JSON lines; nothing is written without it.
        warn: shows the user a loss.
        note: shows the user a recovery.
        thread: writes the file; without it the file is written at once.
    """

    def __init__(self, path: Path | None = None, warn: Callable[[str], None] | None = None,
                 note: Callable[[str], None] | None = None, term: Term | None = None,
                 thread: FileThread | None = None) -> None:
        self._term, self._path, self.warn, self.note = term, path, warn or _silent, note or _silent
        self._thread = thread
        self._lost, self._redispatched, self._damaged, self._seconds_down = 0, 0, 0, 0.0
        self.lost_so_far = 0
        """Workers lost since the log was opened."""

    def lost(self, text: str) -> None:
        """Report a lost worker."""
        self._lost, self.lost_so_far = self._lost + 1, self.lost_so_far + 1
        self.warn(text)

    def learners_lost(self, error: WorkerError, seconds: float, not_restarted: str = "") -> None:
        """Record that a learner was lost, and that all learners were restarted, which took `seconds`; or why not."""
        lost = error if isinstance(error, WorkerLost) else None
        self._lost, self.lost_so_far = self._lost + 1, self.lost_so_far + 1
        self.write({
            "role": error.role, "rank": lost and lost.rank, "incarnation": lost and lost.incarnation,
            "kind": lost.kind if lost else "failed", "method": lost and lost.method, "reason": str(error),
            "call_age_s": lost and round(lost.age_s, 3), "recovery_s": None if not_restarted else seconds,
            "outcome": not_restarted or "all learners restarted from the last checkpoint",
            "lost_at": self.wall_time(seconds),
        }, seconds_down=seconds)

    def damaged(self, role: str, rank: int, incarnation: int, reason: str, seconds: float | None) -> None:
        """Record a bucket of weights that arrived damaged at a generator and was sent again, in `seconds`; None if it
        arrived damaged again, or the generator was lost meanwhile."""
        self._damaged += 1
        self.warn(f"{role}/{rank} got a damaged bucket of weights; it was sent again ({reason})")
        self.write({
            "role": role, "rank": rank, "incarnation": incarnation, "kind": "damaged", "method": "load_weights",
            "reason": reason, "recovery_s": seconds, "lost_at": self.wall_time(seconds or 0.0),
            "outcome": "sent again, intact" if seconds is not None else "sent again, not intact",
        })

    def failed(self, name: str, error: Exception, again_s: float) -> None:
        """Record a background task that failed and will start again; see `background_task.background_task`."""
        self.warn(describe_failure(name, error, again_s))
        self.write({
            "role": "coordinator", "pid": os.getpid(), "kind": "failed", "method": name,
            "reason": f"{type(error).__name__}: {error}", "recovery_s": again_s, "outcome": "it is started again",
            "lost_at": self.wall_time(0.0),
        })

    def write(self, event: Mapping[str, Any], seconds_down: float = 0.0) -> None:
        """Record an event, with the time of day (seconds since 1970) of its end, and `UNKNOWN` where it lacks a key. A
        file that cannot be written only causes a warning, since the fault itself was recovered from.
        """
        self._redispatched += event.get("redispatched", 0)
        self._seconds_down += seconds_down
        if self._path is None:
            return
        row = {"time": round(time.time(), 3), **UNKNOWN, **event}
        if self._thread is None:
            self._append(self._path, row)
        else:
            self._thread.submit(self._append, self._path, row)

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        try:
            append_json_lines(path, [row], self._term)
        except OSError as error:
            self.warn(f"{path} cannot be written ({error.strerror or error}); it lacks this: {json.dumps(row)}")

    def wall_time(self, ago_s: float) -> float:
        """The time of day `ago_s` seconds ago."""
        return round(time.time() - ago_s, 3)

    def count_again(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the counts of metric rows that were dropped because their steps are made again; the next row reports
        them."""
        for row in rows:
            self._lost += int(row.get("faults/lost_workers") or 0)
            self._redispatched += int(row.get("faults/redispatched") or 0)
            self._damaged += int(row.get("faults/damaged_buckets") or 0)
            self._seconds_down += row.get("faults/seconds_down") or 0.0

    def take(self) -> dict[str, float]:
        """Metrics since the last call: workers lost, seconds during which workers now back were down, work made again,
        and buckets of weights that arrived damaged."""
        metrics = {"faults/lost_workers": float(self._lost), "faults/seconds_down": self._seconds_down,
                   "faults/redispatched": float(self._redispatched), "faults/damaged_buckets": float(self._damaged)}
        self._lost, self._redispatched, self._damaged, self._seconds_down = 0, 0, 0, 0.0
        return metrics


def note_restart(path: Path, step: int, term: Term | None = None) -> None:
    """Record in faults.jsonl that the run's process died and was started again, and continues after `step`. Does
    nothing in other processes, and only once in a process."""
    text = os.environ.pop(STARTED_AGAIN, None)
    if text is None:
        return
    loss = json.loads(text)
    FaultLog(path, term=term).write({
        "role": "run", **loss, "recovery_s": round(time.time() - loss["lost_at"], 3),
        "outcome": f"started again from the checkpoint of step {step}",
    })


def read_faults(path: Path) -> list[dict[str, Any]]:
    """Events of a run, oldest first; empty without the file. A last line that a crash left unfinished is skipped.

    Raises:
        DataError: another line is not an event.
    """
    if not path.is_file():
        return []
    events = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and "role" in event:
                events.append(event)
            elif line.endswith(b"\n"):
                start = line.rstrip()[:80]
                raise DataError(f"{path}, line {number}: not a lost worker: {start!r}. Remove the line to continue")
    return events


def in_one_line(events: Sequence[Mapping[str, Any]]) -> str:
    """The lost workers: `generator/0 (died 2 times), policy/1 (hung)`; empty when none was lost. The later line of a
    worker that was missing for some time takes the place of the first."""
    losses = [event for event in events if event["role"] != "coordinator" and event.get("kind") != "damaged"]
    last = {(event["role"], event.get("rank"), event.get("incarnation"), event.get("lost_at", n)): event
            for n, event in enumerate(losses)}
    times = Counter((_name(event), event.get("kind", "lost"), event.get("recovery_s") is None)
                    for event in last.values())
    return ", ".join(f"{who} ({kind}{f' {n} times' if n > 1 else ''}{', not back' if gone else ''})"
                     for (who, kind, gone), n in times.items())


def _name(event: Mapping[str, Any]) -> str:
    """As `generator/0`; the rank of a learner is not always known."""
    return event["role"] if event.get("rank") is None else f"{event['role']}/{event['rank']}"


def _silent(_: str) -> None:
    return
