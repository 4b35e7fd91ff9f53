"""The evidence about a run's faults, and what is concluded from it for one fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chaos.faults import Fault
from chaos.run_record import RunRecord, Start
from rlhf_ray.observability.faults import read_faults
from rlhf_ray.observability.run_directory import RunDirectory

EARLY_S = 0.5
"""An event may seem to precede its cause by this much: its time is computed from durations."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault."""

    run: str
    fault: Fault
    state: str
    """The victim's state when the fault was injected."""
    detection_s: float | None = None
    recovery_s: float | None = None
    """From its detection (for a driver: from its end) until work continues."""
    problem: str = ""
    """Why the fault does not count as survived; empty if it does."""
    injected: bool = True
    repairing: tuple[str, ...] = ()
    """Workers that were being replaced when it was injected."""

    @property
    def survived(self) -> bool:
        """Whether the run survived it."""
        return self.injected and not self.problem


class Evidence:
    """The files of a run that is over."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.events = read_faults(RunDirectory(record.directory).faults)
        """Lines of faults.jsonl. Whoever attributes one to a fault removes it: it belongs to no other fault."""
        self.all_events = tuple(self.events)

    def start_at(self, time: float) -> Start | None:
        """The driver that ran at this time."""
        return next((start for start in self.record.starts if start.began <= time <= start.ended), None)

    def logged(self, event: str, fault: Fault) -> dict[str, Any] | None:
        """The first line of the injection log with this event about this fault, since it was injected last."""
        lines = [line for line in self.record.injections.read() if line.get("fault") == fault.number]
        last = max((index for index, line in enumerate(lines) if line["event"] == "injected"), default=0)
        return next((line for line in lines[last:] if line["event"] == event), None)

    def next_loop(self, time: float) -> float | None:
        """When the next training loop after this time began."""
        return next((line["time"] for line in self.record.injections.read("loop") if line["time"] > time), None)

    def logs(self) -> list[str]:
        """Everything that the drivers printed, by lines."""
        return [line for start in self.record.starts for line in start.log.read_text(errors="replace").splitlines()]
