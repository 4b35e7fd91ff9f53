"""The figures of a chaos run, as plain data: chaos/results/summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from chaos.invariants import Books
from chaos.kinds import KINDS
from chaos.outcome import Outcome
from chaos.supervisor import ChaosRun

FILE = "summary.json"


@dataclass(frozen=True)
class Finished:
    """A run among faults, looked through."""

    record: ChaosRun
    outcomes: list[Outcome]
    broken: list[str]
    undisturbed_s: float
    """Seconds in the loop of the same run without a fault."""
    books: Books
    loop_s: float
    """Seconds from the first loop's beginning to the last end."""
    pauses_s: list[float]
    """For how long training stood still for each checkpoint."""

    @property
    def name(self) -> str:
        """Of the run."""
        return self.record.config.stem

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return self.record.starts[-1].ended - self.record.starts[0].began


@dataclass(frozen=True)
class Chaos:
    """All runs of a call."""

    seed: int
    command: str
    machine: dict[str, Any]
    commit: str
    runs: list[Finished] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Outcome]:
        """Of all faults that were injected."""
        return [outcome for run in self.runs for outcome in run.outcomes if outcome.injected]

    @property
    def missed(self) -> list[Outcome]:
        """Faults whose moment never came."""
        return [outcome for run in self.runs for outcome in run.outcomes if not outcome.injected]

    @property
    def broken(self) -> list[str]:
        """Invariants that do not hold, with the run's name."""
        return [f"{run.name}: {said}" for run in self.runs for said in run.broken]

    @property
    def sound(self) -> bool:
        """Whether every fault was injected and survived and every invariant holds. Ray may lose a message that makes no
        difference, of its own or a farewell; nobody sees that."""
        missed = [outcome for outcome in self.missed if outcome.fault.what.target != "network"]
        return not self.broken and not missed and all(outcome.survived for outcome in self.outcomes)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        found = self.outcomes
        attempts = sum(run.books.trained + run.books.again for run in self.runs)
        pauses = [seconds for run in self.runs for seconds in run.pauses_s]
        loops = sum(run.loop_s for run in self.runs)
        return {
            "injected": len(found), "survived": sum(outcome.survived for outcome in found),
            "kinds": len({outcome.fault.kind for outcome in found}),
            "lost": sum(run.books.lost for run in self.runs),
            "duplicated": sum(run.books.duplicated for run in self.runs),
            "quarantined": sum(run.books.quarantined for run in self.runs),
            "wedges": sum(start.wedged for run in self.runs for start in run.record.starts),
            **quantiles("detection", [o.detection_s for o in found]),
            **quantiles("recovery", [o.recovery_s for o in found]),
            "recomputed_token_share": sum(run.books.again for run in self.runs) / attempts if attempts else 0.0,
            "effective_time_share": sum(run.undisturbed_s for run in self.runs) / loops if loops else None,
            **quantiles("commit_pause", pauses),
            "by_kind": by_kind(found), "broken": self.broken,
            "not_injected": [f"{outcome.run}: {outcome.fault.kind}" for outcome in self.missed],
            "faults": [one(outcome) for outcome in found],
            "runs": {run.name: {"seconds": run.seconds, "starts": len(run.record.starts),
                                "undisturbed_loop_seconds": run.undisturbed_s, "loop_seconds": run.loop_s,
                                "samples": run.books.trained, "attempts_given_up": run.books.again}
                     for run in self.runs},
            "seed": self.seed, "command": self.command, "commit": self.commit, "machine": self.machine,
        }

    def write(self, directory: Path) -> Path:
        """Write summary.json; returns its path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE
        path.write_text(json.dumps(self.plain(), indent=2) + "\n")
        return path


def quantiles(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Median and 95th percentile of what was measured; None where nothing was."""
    known = [value for value in values if value is not None]
    return {f"{name}_median_s": round(median(known), 3) if known else None,
            f"{name}_p95_s": round(float(np.percentile(known, 95)), 3) if known else None}


def by_kind(found: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Counts and median times of each kind that was injected."""
    rows = {}
    for kind in KINDS:
        if mine := [outcome for outcome in found if outcome.fault.kind == kind]:
            rows[kind] = {"injected": len(mine), "survived": sum(o.survived for o in mine),
                          **quantiles("detection", [o.detection_s for o in mine]),
                          **quantiles("recovery", [o.recovery_s for o in mine])}
    return rows


def one(outcome: Outcome) -> dict[str, Any]:
    """A fault as a row."""
    return {"run": outcome.run, "kind": outcome.fault.kind, "state": outcome.state, "survived": outcome.survived,
            "detection_s": outcome.detection_s, "recovery_s": outcome.recovery_s, "problem": outcome.problem}
