"""The terminal output of a run: progress while a benchmark runs, then a table of the figures."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressBar, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.figure import Figure, ordered, shown, shown_goal, shown_value
from rlhf_ray.observability.progress import duration, is_terminal


def print_table(figures: Mapping[str, Figure], machine: Mapping[str, Any]) -> None:
    """Print a row for each figure: both sides, their ratio and its goal; and a warning if the machine was busy."""
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
    """Print how long each benchmark of this run took, and the total."""
    each = ", ".join(f"{name} {duration(taken)}" for name, taken in seconds.items())
    print(f"took {duration(sum(seconds.values()))}: {each}" if seconds else "no benchmark succeeded")


def side(value: float | None, unit: str, what: str) -> str:
    """One side of a figure: its number and what it is."""
    return f"{'' if value is None else shown(value, unit)}\n[dim]{what}"


class ElapsedBar(BarColumn):
    """A bar that fills with time: `total` seconds are what the task usually takes."""

    def render(self, task: Task) -> ProgressBar:
        """Full when the usual time is over; pulsing where it is not known."""
        return ProgressBar(total=task.total, completed=min(task.elapsed or 0.0, task.total or 0.0), width=30,
                           pulse=task.total is None, animation_time=task.get_time())


@contextmanager
def benchmark_progress(
    name: str, plan: Sequence[str], usual: Mapping[str, float], stream: TextIO | None = None
) -> Iterator[None]:
    """Show progress while the benchmark `name` of `plan` runs.

    Args:
        usual: seconds of each benchmark in earlier runs, as far as known.
        stream: output stream; standard error by default.
    """
    stream = stream or sys.stderr
    place, left = plan.index(name), time_left(plan[plan.index(name):], usual)
    head = f"[{place + 1}/{len(plan)}] {name}"
    if not is_terminal(stream):
        print(f"{head}, {left}", file=stream, flush=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn(head, markup=False), ElapsedBar(), TimeElapsedColumn(), TextColumn(left))
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        progress.add_task(name, total=usual.get(name))
        yield


def time_left(names: Sequence[str], usual: Mapping[str, float]) -> str:
    """"about 12 min left", with the number of benchmarks that were not timed before."""
    known = [usual[name] for name in names if name in usual]
    untimed = len(names) - len(known)
    parts = [f"about {duration(sum(known))} left"] if known else []
    return " + ".join([*parts, *([f"{untimed} not timed before"] if untimed else [])])
