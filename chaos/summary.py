"""The figures of a chaos campaign: chaos/results/summary.json, and tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from chaos.evidence import Outcome
from chaos.invariants import Books
from chaos.kinds import KINDS, kind_of, triples
from chaos.run_record import RunRecord
from chaos.witness.testimony import WitnessReport

FILE = "summary.json"
HEADINGS = ("fault", "injected", "survived", "noticed after", "back after")


@dataclass(frozen=True)
class FinishedRun:
    """One run with faults, and its evaluation."""

    record: RunRecord
    outcomes: list[Outcome]
    broken: list[str]
    undisturbed_s: float
    """Seconds in the loop of the same run without faults."""
    books: Books
    testimony: WitnessReport
    loop_s: float
    """Seconds from the first loop's beginning to the last end."""
    pauses_s: list[float]
    """For how long training paused for each checkpoint."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.record.config.stem

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return self.record.starts[-1].ended - self.record.starts[0].began


@dataclass(frozen=True)
class CampaignSummary:
    """All runs of one `make chaos`."""

    seed: int
    command: str
    machine: dict[str, Any]
    commit: str
    runs: list[FinishedRun] = field(default_factory=list)
    not_tried: dict[str, str] = field(default_factory=dict)
    """Kinds that are not possible on the machine, and why."""

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all faults that were injected."""
        return [outcome for run in self.runs for outcome in run.outcomes if outcome.injected]

    @property
    def missed(self) -> list[Outcome]:
        """Faults whose required state was never reached."""
        return [outcome for run in self.runs for outcome in run.outcomes if not outcome.injected]

    @property
    def broken(self) -> list[str]:
        """Invariants that do not hold, with the run's name."""
        return [f"{run.name}: {said}" for run in self.runs for said in run.broken]

    @property
    def sound(self) -> bool:
        """Whether every fault was injected and survived and every invariant holds. A lost message need not be injected:
        Ray may lose one that makes no difference, and the run's files do not show it."""
        missed = [outcome for outcome in self.missed if not kind_of(outcome.fault).may_not_happen]
        return not self.broken and not missed and all(outcome.survived for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        outcomes = self.outcomes
        attempts = sum(run.books.trained + run.books.again for run in self.runs)
        pauses = [seconds for run in self.runs for seconds in run.pauses_s]
        loops = sum(run.loop_s for run in self.runs)
        return {
            "injected": len(outcomes), "survived": sum(outcome.survived for outcome in outcomes),
            "kinds": len(triples(outcome.fault.kind for outcome in outcomes)),
            "second_faults": sum(bool(outcome.repairing) for outcome in outcomes),
            "lost": sum(run.books.lost for run in self.runs),
            "duplicated": sum(run.books.duplicated for run in self.runs),
            "oracle_lost": sum(run.testimony.lost for run in self.runs),
            "oracle_duplicated": sum(run.testimony.duplicated for run in self.runs),
            "quarantined": sum(run.books.quarantined for run in self.runs),
            "wedges": sum(start.wedged for run in self.runs for start in run.record.starts),
            **quantiles("detection", [o.detection_s for o in outcomes]),
            **quantiles("recovery", [o.recovery_s for o in outcomes]),
            "recomputed_token_share": sum(run.books.again for run in self.runs) / attempts if attempts else 0.0,
            "effective_time_share": sum(run.undisturbed_s for run in self.runs) / loops if loops else None,
            **quantiles("commit_pause", pauses),
            "by_kind": by_kind(outcomes), "broken": self.broken,
            "not_injected": [f"{outcome.run}: {outcome.fault.kind}" for outcome in self.missed],
            "not_tried": self.not_tried,
            "faults": [fault_row(outcome) for outcome in outcomes],
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
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        return path


def quantiles(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Median and 95th percentile of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return {f"{name}_median_s": round(median(known), 3) if known else None,
            f"{name}_p95_s": round(float(np.percentile(known, 95)), 3) if known else None}


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Counts and median times of each kind that was injected."""
    rows = {}
    for kind in KINDS:
        if mine := [outcome for outcome in outcomes if outcome.fault.kind == kind]:
            rows[kind] = {"injected": len(mine), "survived": sum(o.survived for o in mine),
                          **quantiles("detection", [o.detection_s for o in mine]),
                          **quantiles("recovery", [o.recovery_s for o in mine])}
    return rows


def fault_row(outcome: Outcome) -> dict[str, Any]:
    """A fault as plain data for JSON."""
    return {"run": outcome.run, "kind": outcome.fault.kind, "state": outcome.state, "survived": outcome.survived,
            "repairing": list(outcome.repairing),
            "detection_s": outcome.detection_s, "recovery_s": outcome.recovery_s, "problem": outcome.problem}


def rows(campaign: CampaignSummary) -> list[tuple[str, ...]]:
    """A row for each kind: description, faults injected, faults survived, and median seconds."""
    data = campaign.as_dict()["by_kind"]
    return [(KINDS[kind].words, str(row["injected"]), str(row["survived"]), seconds(row["detection_median_s"]),
             seconds(row["recovery_median_s"])) for kind, row in data.items()]


def figures(campaign: CampaignSummary) -> dict[str, str]:
    """The main figures as text, by their names."""
    data = campaign.as_dict()
    effective = data["effective_time_share"]
    return {
        "Faults survived": f"{data['survived']} of {data['injected']}, {data['kinds']} kinds",
        "Samples lost": str(data["lost"]), "Samples trained on twice": str(data["duplicated"]),
        "Samples lost, by the witness": str(data["oracle_lost"]),
        "Samples trained on twice, by the witness": str(data["oracle_duplicated"]),
        "Samples quarantined": str(data["quarantined"]),
        "Injected during the repair of another": str(data["second_faults"]), "Wedges": str(data["wedges"]),
        "Noticed after": _both(data, "detection"), "Back after": _both(data, "recovery"),
        "Tokens computed twice": f"{data['recomputed_token_share']:.1%} at most",
        "Share of time effective": "unknown" if effective is None else f"{effective:.0%}",
        "Pause of a commit": _both(data, "commit_pause"),
    }


def print_report(campaign: CampaignSummary) -> None:
    """Print the table, the figures, and the problems with commands that repeat them."""
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title=f"seed {campaign.seed}", title_justify="left")
    for name in HEADINGS:
        table.add_column(name, justify="left" if name == "fault" else "right")
    for row, outcome in zip(rows(campaign), campaign.as_dict()["by_kind"].values(), strict=True):
        style = "" if outcome["injected"] == outcome["survived"] else "red"
        table.add_row(*row, style=style)
    console.print(table)
    for name, value in figures(campaign).items():
        console.print(f"{name}: {value}", highlight=False)
    for line in not_tried(campaign):
        console.print(line, highlight=False, soft_wrap=True)
    for line in problems(campaign):
        console.print(f"[red]{line}", highlight=False, soft_wrap=True)


def not_tried(campaign: CampaignSummary) -> list[str]:
    """A line for each kind that is not possible on the machine."""
    return [f"not tried: {kind} ({reason})" for kind, reason in campaign.not_tried.items()]


def problems(campaign: CampaignSummary) -> list[str]:
    """Faults that were not survived, with the command that repeats each, or not injected; and broken invariants."""
    lines = [f"{outcome.run}: {outcome.fault.kind} was not survived: {outcome.problem}. "
             f"Alone: {repeat_command(campaign, outcome)}"
             for outcome in campaign.outcomes if not outcome.survived]
    lines += [f"{outcome.run}: {outcome.fault.kind} was not injected: {outcome.problem}" for outcome in campaign.missed]
    return lines + [f"broken: {violation}" for violation in campaign.broken]


def repeat_command(campaign: CampaignSummary, outcome: Outcome) -> str:
    """The command that repeats a fault's kind alone."""
    return f"python -m chaos --seed {campaign.seed} --only {outcome.fault.kind}"


def seconds(value: float | None) -> str:
    """Seconds as text with a unit; a dash for None."""
    return "-" if value is None else f"{value:.1f} s" if value >= 0.95 else f"{1000 * value:.0f} ms"


def _both(data: dict[str, float | None], name: str) -> str:
    return f"{seconds(data[f'{name}_median_s'])} (median), {seconds(data[f'{name}_p95_s'])} (95th percentile)"
