"""A run's numbers: one JSON row per step in metrics.jsonl, and the same numbers to every sink.

The report and a resumed run read metrics.jsonl; the sinks only show it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import DataError
from rlhf_ray.files.fsync import fsync_descriptor
from rlhf_ray.files.writing import json_lines, write_atomically
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sinks import open_sinks

NOTHING = -1
"""The step after which the rows of a run that starts over are dropped: all rows. (Step 0 may have an evaluation.)"""


class MetricsWriter:
    """Appends rows of flat, slash-named metrics (`reward/mean`) and hands them to the sinks."""

    def __init__(
        self, run_dir: Path, logging: LoggingConfig, resume_at: int | None = None, term: Term | None = None
    ) -> None:
        """Open the run's metrics; `resume_at=k` first drops the rows of steps after k, which will be made again.

        Without `resume_at` existing rows stay (a stage that opens its metrics a second time).

        Args:
            term: ownership term of the run's directory.

        Raises:
            ConfigError: the package of a configured sink is missing.
            DataError: metrics.jsonl is damaged elsewhere than in its last line.
        """
        run = RunDirectory(run_dir)
        run.path.mkdir(parents=True, exist_ok=True)
        self._term = term
        self.dropped = _truncate(run.metrics, resume_at, term)
        """Rows that were dropped."""
        self._sinks = open_sinks(run, logging, resume_at)
        self._path = run.metrics
        self._file = open(run.metrics, "ab")  # noqa: SIM115 - open for as long as the run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row and give it to the sinks. The row is on disk when this returns.

        A value that is not finite is written as null. Several rows may have the same step.

        Raises:
            ValueError: a metric is called `step` or `time`, or its value is not a number.
            SupersededError: another driver owns the run's directory now.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        row = {"step": int(step), "time": round(time.time(), 3), **numbers}
        if self._term is not None:
            self._term.check()  # a row written just too late is lost: a successor replaces the file
        self._file.write(json_lines([row]))
        self._file.flush()
        fsync_descriptor(self._file.fileno(), self._path)
        finite = {name: value for name, value in numbers.items() if value is not None}
        for sink in self._sinks:
            sink.write(int(step), finite)

    def close(self) -> None:
        """Close the file and the sinks. May be called twice."""
        self._file.close()
        while self._sinks:
            self._sinks.pop().close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl in the order written; [] without the file. Null stands for "not a finite number".

    A last line that a crash left unfinished is skipped.

    Raises:
        DataError: another line is not a JSON object with a step.
    """
    path = RunDirectory(run_dir).metrics
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{path}, line {number}: not a metrics row: {line[:80]!r}. Remove the line to continue")
    return rows


def _truncate(path: Path, last_step: int | None, term: Term | None) -> list[dict[str, Any]]:
    """Rewrite the file without an unfinished last line, to which the next row would be appended, and without rows of
    later steps, which are returned."""
    if not path.exists():
        return []
    rows = read_metrics(path.parent)
    kept = [row for row in rows if last_step is None or row["step"] <= last_step]
    write_atomically(path, json_lines(kept), term)
    return [row for row in rows if last_step is not None and row["step"] > last_step]


def _parse(line: bytes) -> dict[str, Any] | None:
    """A row, or None for a line that is empty, unfinished or not a row. NaN written by another tool is read as null."""
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except ValueError:  # covers bytes that are not UTF-8 too
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _number(name: str, value: Any) -> float | None:
    if name in ("step", "time"):
        raise ValueError(f"a metric cannot be called {name!r}: every row has that key already")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name}={value!r} is not a number") from error
    return number if math.isfinite(number) else None
