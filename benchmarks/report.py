"""Figures as a table for people and as a file for programs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure


def print_table(figures: Mapping[str, Figure], machine: Mapping[str, Any]) -> None:
    """Both sides, their ratio and its goal, a row a figure, and a warning if the machine had other work."""
    table = Table(title=f"{machine['cores']} cores, {machine['cpu']}", title_justify="left")
    for column in ("figure", "ours", "other side", "value", "lowest - highest", "goal"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, figure in figures.items():
        colour, sign = "green" if figure.reached else "red", "≥" if figure.better == "higher" else "≤"
        table.add_row(
            name, side(figure.ours, figure.unit, figure.ours_is), side(figure.theirs, figure.unit, figure.theirs_is),
            f"[bold {colour}]{figure.value:.3g}", f"{min(figure.repeats):.3g} - {max(figure.repeats):.3g}",
            f"{sign} {figure.goal:g}", end_section=True)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    disturbed = [name for name, figure in figures.items() if figure.disturbed]
    if disturbed:
        console.print(f"[yellow]Other processes took part of the cores during {', '.join(disturbed)} (load average "
                      f"{machine['load_average_1min']} at the start): run again on a quiet machine.")


def write_summary(figures: Mapping[str, Figure], machine: Mapping[str, Any], directory: Path) -> Path:
    """Write `summary.json`: each figure's value by its name, `details` with what stands behind it, and the machine."""
    summary: dict[str, Any] = {name: figure.value for name, figure in figures.items()}
    summary["details"] = {
        name: {**asdict(figure), "reached": figure.reached, "disturbed": figure.disturbed}
        for name, figure in figures.items()
    }
    summary["machine"] = dict(machine)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return path


def side(value: float | None, unit: str, what: str) -> str:
    """One side of a figure: its number and what it is."""
    number = "" if value is None else shown(value, unit)
    return f"{number}\n[dim]{what}"


def shown(value: float, unit: str) -> str:
    """A measured number with its unit."""
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3f} {unit}"
