"""A chaos run as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from chaos.kinds import KINDS
from chaos.outcome import Outcome
from chaos.summary import Chaos

HEADINGS = ("fault", "injected", "survived", "noticed after", "back after")


def rows(chaos: Chaos) -> list[tuple[str, ...]]:
    """A row a kind: what was done, how often, how often survived, and median seconds."""
    told = chaos.plain()["by_kind"]
    return [(KINDS[kind].words, str(row["injected"]), str(row["survived"]), seconds(row["detection_median_s"]),
             seconds(row["recovery_median_s"])) for kind, row in told.items()]


def figures(chaos: Chaos) -> dict[str, str]:
    """The numbers that matter, in words."""
    told = chaos.plain()
    effective = told["effective_time_share"]
    return {
        "Faults survived": f"{told['survived']} of {told['injected']}, {told['kinds']} kinds",
        "Samples lost": str(told["lost"]), "Samples trained on twice": str(told["duplicated"]),
        "Samples quarantined": str(told["quarantined"]), "Wedges": str(told["wedges"]),
        "Noticed after": _both(told, "detection"), "Back after": _both(told, "recovery"),
        "Tokens computed twice": f"{told['recomputed_token_share']:.1%} at most",
        "Share of time effective": "unknown" if effective is None else f"{effective:.0%}",
        "Pause of a commit": _both(told, "commit_pause"),
    }


def print_report(chaos: Chaos) -> None:
    """The table, the figures, and what went wrong with how to see it again."""
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title=f"seed {chaos.seed}", title_justify="left")
    for name in HEADINGS:
        table.add_column(name, justify="left" if name == "fault" else "right")
    for row, outcome in zip(rows(chaos), chaos.plain()["by_kind"].values(), strict=True):
        style = "" if outcome["injected"] == outcome["survived"] else "red"
        table.add_row(*row, style=style)
    console.print(table)
    for name, value in figures(chaos).items():
        console.print(f"{name}: {value}", highlight=False)
    for line in wrong(chaos):
        console.print(f"[red]{line}", highlight=False, soft_wrap=True)


def wrong(chaos: Chaos) -> list[str]:
    """Faults that were not survived, or not injected, with the command for each alone; and broken invariants."""
    found = [f"{outcome.run}: {outcome.fault.kind} was not survived: {outcome.problem}. Alone: {again(chaos, outcome)}"
             for outcome in chaos.outcomes if not outcome.survived]
    found += [f"{outcome.run}: {outcome.fault.kind} was not injected: {outcome.problem}" for outcome in chaos.missed]
    return found + [f"broken: {said}" for said in chaos.broken]


def again(chaos: Chaos, outcome: Outcome) -> str:
    """The command that repeats a fault's kind alone."""
    return f"python -m chaos --seed {chaos.seed} --only {outcome.fault.kind}"


def seconds(value: float | None) -> str:
    """As people read it; a dash for what was not measured."""
    return "-" if value is None else f"{value:.1f} s" if value >= 0.95 else f"{1000 * value:.0f} ms"


def _both(told: dict[str, float | None], name: str) -> str:
    return f"{seconds(told[f'{name}_median_s'])} (median), {seconds(told[f'{name}_p95_s'])} (95th percentile)"
