"""A run's numbers: one JSON row per step in metrics.jsonl, and the same numbers to every sink.

The report and a resumed run read metrics.jsonl; the sinks only show it. The file of a long run ends at PART_BYTES, and
metrics-00002.jsonl, metrics-00003.jsonl, ... follow it, so that a resume replaces, and an upload copies, the newest one
alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlhf_ray.config.training_loop import LoggingConfig
from rlhf_ray.errors import DataError
from rlhf_ray.files.fsync import fsync_descriptor
from rlhf_ray.files.writing import json_lines, lines_from_end, write_atomically
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.sinks import open_sinks

NOTHING = -1
"""The step after which the rows of a run that starts over are dropped: all rows. (Step 0 may have an evaluation.)"""
PART_BYTES = 64 * 2**20
"""Size from which on a file of metrics is followed by another one: some 25,000 steps."""


class MetricsWriter:
    """Appends rows of flat, slash-named metrics (`reward/mean`) and hands them to the sinks."""

    def __init__(
        self, run_dir: Path, logging: LoggingConfig, resume_at: int | None = None, term: Term | None = None
    ) -> None:
        """Open the run's metrics; `resume_at=k` first drops the rows of steps after k, which will be made again.

        Without `resume_at` existing rows stay (a stage that opens its metrics a second time).

        Raises:
            ConfigError: the package of a configured sink is missing.
            DataError: metrics.jsonl is damaged in a row of a later step, elsewhere than in its last line.
        """
        run = RunDirectory(run_dir)
        run.path.mkdir(parents=True, exist_ok=True)
        self._run, self._term = run, term
        self.dropped = _truncate(run, resume_at, term)
        """Rows that were dropped, oldest first: their steps and what they count of faults."""
        self._sinks = open_sinks(run, logging, resume_at)
        self._path = (run.metrics_parts() or [run.metrics])[-1]
        self._newest = next(metric_rows_from_end(run.path), {})
        self._file = open(self._path, "ab")  # noqa: SIM115 - open for as long as the run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row and give it to the sinks. The row is on disk when this returns.

        A value that is not finite is written as null. Several rows may have the same step, but a row with the step and
        the numbers of the newest one is not written: an evaluation that a resumed run makes again.

        Raises:
            ValueError: a metric is called `step` or `time`, or its value is not a number.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        row = {"step": int(step), "time": round(time.time(), 3), **numbers}
        if {**row, "time": self._newest.get("time")} == self._newest:
            return
        self._newest = row
        if self._file.tell() >= PART_BYTES:
            self._file.close()
            self._path = self._run.metrics_part(len(self._run.metrics_parts()) + 1)
            self._file = open(self._path, "ab")  # noqa: SIM115
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
    """All rows of a run; see `metric_rows`."""
    return list(metric_rows(run_dir))


def metric_rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Rows of a run's metrics.jsonl in the order written, one at a time; none without the file. Null stands for "not a
    finite number".

    A last line that a crash left unfinished is skipped.

    Raises:
        DataError: another line is not a JSON object with a step.
    """
    for path in RunDirectory(run_dir).metrics_parts():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if (row := _parse(line)) is not None:
                    yield row
                elif line.endswith(b"\n"):
                    raise _damaged(path, number, line)


def metric_rows_from_end(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The same rows, newest first; reads no more of the file than it is asked for. Errors as in `metric_rows`."""
    for path in reversed(RunDirectory(run_dir).metrics_parts()):
        yield from (row for _, row in _rows_from_end(path))


def _rows_from_end(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of one file, newest first, and where each ends."""
    for start, line in lines_from_end(path):
        if (row := _parse(line)) is not None:
            yield start + len(line), row
        elif line.endswith(b"\n"):
            with path.open("rb") as file:
                ends = enumerate(accumulate(map(len, file)), start=1)
                raise _damaged(path, next(number for number, end in ends if end > start), line)


def _damaged(path: Path, number: int, line: bytes) -> DataError:
    start = line.rstrip()[:80]
    return DataError(f"{path}, line {number}: not a metrics row: {start!r}. Remove the line to continue")


def _truncate(run: RunDirectory, last_step: int | None, term: Term | None) -> list[dict[str, Any]]:
    """Remove an unfinished last line, to which the next row would be appended, and the rows of later steps, of which
    the result has the steps and counts of faults. The newest file is replaced in any case: another driver may still
    have the old one open."""
    dropped: list[dict[str, Any]] = []
    for path in reversed(run.metrics_parts()):
        end = 0
        for stop, row in _rows_from_end(path):
            if last_step is None or row["step"] <= last_step:
                end = stop
                break
            dropped.append({name: value for name, value in row.items() if name == "step" or name.startswith("faults/")})
        if end or path == run.metrics:
            with path.open("rb") as file:
                rows = file.read(end)
            write_atomically(path, rows if rows.endswith(b"\n") or not rows else rows + b"\n", term)
            break
        if term is not None:
            term.check()
        path.unlink()
    return dropped[::-1]


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
