"""What is known of every figure: `summary.json`, read, joined with what a run measured, and written again.

A run of some benchmarks leaves the figures of the others as they were, each with the time, commit and machine it was
measured at.
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
    """Wall time of each benchmark, the last time it came through."""
    failed: dict[str, str] = field(default_factory=dict)
    """Benchmarks that failed the last time they ran, and why."""

    def came_through(self, benchmark: str, figures: Mapping[str, Figure], seconds: float, run: RunFacts) -> None:
        """Take in what a benchmark gave; figures that it gave before and does not any more are dropped."""
        self.failed.pop(benchmark, None)
        self.seconds[benchmark] = seconds
        kept = {name: m for name, m in self.measured.items() if m.benchmark != benchmark}
        self.measured = kept | {name: Measured(figure, benchmark, run) for name, figure in figures.items()}

    def write(self, directory: Path, latest: RunFacts) -> Path:
        """Each figure's value by its name; `details`: what stands behind it; `machine`: that of the latest run."""
        runs = {m.run.time: asdict(m.run) for m in self.measured.values()} | {latest.time: asdict(latest)}
        told = {
            **{name: m.figure.value for name, m in self.measured.items()},
            "details": {name: detail(m) for name, m in self.measured.items()},
            "machine": dict(latest.machine), "seconds": self.seconds, "failed": self.failed, "runs": runs,
        }
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f"{FILE}.new"
        unfinished.write_text(json.dumps(told, indent=2) + "\n")
        return unfinished.replace(directory / FILE)


def detail(measured: Measured) -> dict[str, Any]:
    """A figure with everything behind it, in plain types."""
    figure = measured.figure
    return {**asdict(figure), "reached": figure.reached, "disturbed": figure.disturbed,
            "benchmark": measured.benchmark, "measured": measured.run.time, "commit": measured.run.commit}


def read_summary(directory: Path) -> Summary:
    """What earlier runs left in `directory`; nothing, where there is no summary or one of another form."""
    path = directory / FILE
    if not path.exists():
        return Summary()
    try:
        told = json.loads(path.read_text())
        runs = {time: RunFacts(**run) for time, run in told["runs"].items()}
        known = {f.name for f in fields(Figure)}
        measured = {
            name: Measured(Figure(**{k: v for k, v in of.items() if k in known}), of["benchmark"], runs[of["measured"]])
            for name, of in told["details"].items()}
        return Summary(measured, told["seconds"], told["failed"])
    except (ValueError, KeyError, TypeError) as error:
        print(f"{path} is left out, it is not of the present form ({type(error).__name__}: {error})", file=sys.stderr)
        return Summary()


def commit() -> str:
    """See `RunFacts.commit`."""
    def git(*words: str) -> str:
        told = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return told.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
