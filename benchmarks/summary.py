"""All figures: reads `summary.json`, adds those of a run, and writes it again.

A run of some benchmarks keeps the figures of the others, each with the time, commit and machine of its measurement.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from benchmarks.figure import Figure

FILE = "summary.json"


@dataclass(frozen=True)
class RunFacts:
    """One call of `python -m benchmarks`."""

    time: str
    """When it began, in UTC (ISO 8601)."""
    commit: str
    """Of the source; ends in "+" where files differ from it, and is empty outside a git checkout."""
    command: str
    machine: Mapping[str, Any]

    @classmethod
    def now(cls, machine: Mapping[str, Any]) -> Self:
        """The call under way."""
        command = " ".join(["python -m benchmarks", *sys.argv[1:]])
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), commit(), command, machine)


@dataclass(frozen=True)
class Measured:
    """A figure, and which benchmark gave it in which run."""

    figure: Figure
    benchmark: str
    run: RunFacts


@dataclass
class Summary:
    """All figures known so far."""

    measured: dict[str, Measured] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each benchmark's last success."""
    failed: dict[str, str] = field(default_factory=dict)
    """Benchmarks that failed the last time they ran, and why."""

    def add(self, benchmark: str, figures: Mapping[str, Figure], seconds: float, run: RunFacts) -> None:
        """Add the figures of a benchmark, in place of its earlier ones."""
        self.failed.pop(benchmark, None)
        self.seconds[benchmark] = seconds
        kept = {name: m for name, m in self.measured.items() if m.benchmark != benchmark}
        self.measured = kept | {name: Measured(figure, benchmark, run) for name, figure in figures.items()}

    def write(self, directory: Path, latest: RunFacts) -> Path:
        """Write each figure's value by its name, its `details`, and the `machine` of the latest run."""
        runs = {m.run.time: asdict(m.run) for m in self.measured.values()} | {latest.time: asdict(latest)}
        data = {
            **{name: m.figure.value for name, m in self.measured.items()},
            "details": {name: detail(m) for name, m in self.measured.items()},
            "machine": dict(latest.machine), "seconds": self.seconds, "failed": self.failed, "runs": runs,
        }
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f"{FILE}.new"
        unfinished.write_text(json.dumps(data, indent=2) + "\n")
        return unfinished.replace(directory / FILE)


def detail(measured: Measured) -> dict[str, Any]:
    """A figure with everything behind it, in plain types."""
    figure = measured.figure
    return {**asdict(figure), "reached": figure.reached, "disturbed": figure.disturbed,
            "benchmark": measured.benchmark, "measured": measured.run.time, "commit": measured.run.commit}


def read_summary(directory: Path) -> Summary:
    """The figures of earlier runs in `directory`; none where there is no summary, or one of another format."""
    path = directory / FILE
    if not path.exists():
        return Summary()
    try:
        data = json.loads(path.read_text())
        runs = {time: RunFacts(**run) for time, run in data["runs"].items()}
        known = {f.name for f in fields(Figure)}
        measured = {
            name: Measured(Figure(**{k: v for k, v in of.items() if k in known}), of["benchmark"], runs[of["measured"]])
            for name, of in data["details"].items()}
        return Summary(measured, data["seconds"], data["failed"])
    except (ValueError, KeyError, TypeError) as error:
        print(f"{path} is ignored: it is not of the present format ({type(error).__name__}: {error})", file=sys.stderr)
        return Summary()


def commit() -> str:
    """See `RunFacts.commit`."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
