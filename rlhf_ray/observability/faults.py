"""What went wrong in a run and was put right: told to the person, counted for the metrics, kept in faults.jsonl."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_ray.errors import DataError, WorkerError, WorkerLost
from rlhf_ray.files.thread import FileThread
from rlhf_ray.files.writing import append_json_lines
from rlhf_ray.observability.background_task import describe_failure
from rlhf_ray.observability.owner_record import Term

STARTED_AGAIN = "RLHF_RAY_STARTED_AGAIN"
"""Variable of the environment that tells a run that it takes the place of one that died: its end, as JSON."""


class FaultLog:
    """One line a lost worker, written when it is back, or will not come back. A resumed run appends.

    Args:
        path: file of JSON lines; nothing is written without one.
        warn: tells a person of a loss.
        note: tells a person that it is made good.
        term: of the owner of the run's directory, where the file is.
        thread: writes the file; without one it is written at once.
    """

    def __init__(self, path: Path | None = None, warn: Callable[[str], None] | None = None,
                 note: Callable[[str], None] | None = None, term: Term | None = None,
                 thread: FileThread | None = None) -> None:
        self._term, self._path, self._warn, self._note = term, path, warn or _silent, note or _silent
        self._thread = thread
        self._lost, self._redispatched, self._seconds_down = 0, 0, 0.0
        self.lost_so_far = 0
        """Workers lost since the log was opened."""

    def lost(self, text: str) -> None:
        """A worker is lost."""
        self._lost, self.lost_so_far = self._lost + 1, self.lost_so_far + 1
        self._warn(text)

    def rebuilt(self, error: WorkerError, seconds: float) -> None:
        """A learner was lost, and all of them were built again, which took so long."""
        lost = error if isinstance(error, WorkerLost) else None
        self._lost, self.lost_so_far = self._lost + 1, self.lost_so_far + 1
        self.write({
            "role": error.role, "rank": lost and lost.rank, "incarnation": lost and lost.incarnation, "pid": None,
            "kind": lost.kind if lost else "failed", "method": lost and lost.method, "reason": str(error),
            "call_age_s": lost and round(lost.age_s, 3), "detection_s": None, "recovery_s": seconds,
            "outcome": "all learners built again from the last checkpoint", "redispatched": 0,
            "lost_at": self.wall_time(seconds),
        }, seconds_down=seconds)

    def back(self, text: str) -> None:
        """It is back."""
        self._note(text)

    def failed(self, name: str, error: Exception, again_s: float) -> None:
        """A background task failed, and will start again; see `background.background_task`."""
        self._warn(describe_failure(name, error, again_s))
        self.write({
            "role": "coordinator", "rank": None, "incarnation": None, "pid": os.getpid(), "kind": "failed",
            "method": name, "reason": f"{type(error).__name__}: {error}", "call_age_s": None, "detection_s": None,
            "recovery_s": again_s, "outcome": "it is started again", "redispatched": 0, "lost_at": self.wall_time(0.0),
        })

    def write(self, event: Mapping[str, Any], seconds_down: float = 0.0) -> None:
        """Keep an event, with the time of day (seconds since 1970) at which it was over. A file that cannot be written
        is told of and ends nothing: what the event is about was made good.

        Raises:
            SupersededError: another driver owns the run's directory now.
        """
        self._redispatched += event.get("redispatched", 0)
        self._seconds_down += seconds_down
        if self._path is None:
            return
        row = {"time": round(time.time(), 3), **event}
        if self._thread is None:
            self._append(self._path, row)
        else:
            self._thread.submit(self._append, self._path, row)

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        try:
            append_json_lines(path, [row], self._term)
        except OSError as error:
            self._warn(f"{path} cannot be written ({error.strerror or error}); it lacks this: {json.dumps(row)}")

    def wall_time(self, ago_s: float) -> float:
        """The time of day `ago_s` seconds ago."""
        return round(time.time() - ago_s, 3)

    def count_again(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of metrics were dropped, since their steps are made again: what they counted belongs to the next row."""
        for row in rows:
            self._lost += int(row.get("faults/lost_workers") or 0)
            self._redispatched += int(row.get("faults/redispatched") or 0)
            self._seconds_down += row.get("faults/seconds_down") or 0.0

    def take(self) -> dict[str, float]:
        """Metrics since the last call: workers lost, seconds that those now back were down, and work made again."""
        found = {"faults/lost_workers": float(self._lost), "faults/seconds_down": self._seconds_down,
                 "faults/redispatched": float(self._redispatched)}
        self._lost, self._redispatched, self._seconds_down = 0, 0, 0.0
        return found


def note_restart(path: Path, step: int, term: Term | None = None) -> None:
    """Keep in a run's faults.jsonl that it died and was started again, now that it goes on after `step`; nothing where
    this process does not take the place of another one. Once a process."""
    told = os.environ.pop(STARTED_AGAIN, None)
    if told is None:
        return
    loss = json.loads(told)
    FaultLog(path, term=term).write({
        "role": "run", "rank": None, "incarnation": None, "method": None, "call_age_s": None, "detection_s": None,
        **loss, "recovery_s": round(time.time() - loss["lost_at"], 3), "redispatched": 0,
        "outcome": f"started again from the checkpoint of step {step}",
    })


def read_faults(path: Path) -> list[dict[str, Any]]:
    """Events of a run, oldest first; none where there is no file. A last line that a crash left half-written is passed
    over.

    Raises:
        DataError: another line is not an event.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and "role" in event:
            events.append(event)
        elif number < len(lines):
            raise DataError(f"{path}, line {number}: not a lost worker: {line[:80]!r}. Remove the line to go on")
    return events


def in_one_line(events: Sequence[Mapping[str, Any]]) -> str:
    """Who was lost, for people: `generator/0 (died 2 times), policy/1 (hung)`; nothing when nobody was."""
    times = Counter((_name(event), event.get("kind", "lost"), event.get("recovery_s") is None) for event in events)
    return ", ".join(f"{who} ({kind}{f' {n} times' if n > 1 else ''}{', not back' if gone else ''})"
                     for (who, kind, gone), n in times.items())


def _name(event: Mapping[str, Any]) -> str:
    """As `generator/0`; a learner's rank is not always known."""
    return event["role"] if event.get("rank") is None else f"{event['role']}/{event['rank']}"


def _silent(_: str) -> None:
    return
