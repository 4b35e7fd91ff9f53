"""The figures of a run as a table for people."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure
from benchmarks.words import ordered, shown, shown_goal, shown_value
from rlhf_ray.observability.progress import duration


def print_table(figures: Mapping[str, Figure], machine: Mapping[str, Any]) -> None:
    """Both sides, their ratio and its goal, a row a figure, and a warning if the machine had other work."""
    table = Table(title=f"{machine['cores']} cores, {machine['cpu']}", title_justify="left")
    for column in ("figure", "ours", "other side", "value", "lowest - highest", "goal"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name in ordered(list(figures)):
        figure = figures[name]
        colour = "green" if figure.reached else "red"
        table.add_row(
            name, side(figure.ours, figure.unit, figure.ours_is), side(figure.theirs, figure.unit, figure.theirs_is),
            f"[bold {colour}]{shown_value(figure)}", f"{min(figure.repeats):.3g} - {max(figure.repeats):.3g}",
            f"{shown_goal(figure)}{'' if figure.reached else ' missed'}", end_section=True)
    console = Console(width=None if Console().is_terminal else 120)
    if figures:
        console.print(table)
    disturbed = [name for name, figure in figures.items() if figure.disturbed]
    if disturbed:
        console.print(f"[yellow]Other processes took part of the cores during {', '.join(disturbed)} (load average "
                      f"{machine['load_average_1min']} at the start): run again on a quiet machine.")


def print_times(seconds: Mapping[str, float]) -> None:
    """How long each benchmark of this run took, and all of them."""
    each = ", ".join(f"{name} {duration(taken)}" for name, taken in seconds.items())
    print(f"took {duration(sum(seconds.values()))}: {each}" if seconds else "nothing came through")


def side(value: float | None, unit: str, what: str) -> str:
    """One side of a figure: its number and what it is."""
    return f"{'' if value is None else shown(value, unit)}\n[dim]{what}"
