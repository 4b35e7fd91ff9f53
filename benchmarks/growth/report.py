"""The study as Markdown and as a drawing: power laws fitted to the cells, every cell, and plots of time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.growth.cells import Cell
from benchmarks.growth.settings import CELL_S, LENGTHS, SIZES
from benchmarks.svg import Chart, Line, drawing


@dataclass(frozen=True)
class PowerLaw:
    """y = factor * x ** exponent."""

    exponent: float
    factor: float
    residual: float
    """Root mean square of log(y / law), as a relative error: 0.1 is 10% off."""
    points: int


def power_law(xs: Sequence[float], ys: Sequence[float]) -> PowerLaw | None:
    """The law with the least squared error of log y; None with fewer than two points. Two fit a line exactly, so that
    their residual says nothing."""
    if len(xs) < 2:
        return None
    x, y = np.log(np.asarray(xs, dtype=float)), np.log(np.asarray(ys, dtype=float))
    exponent, constant = np.polyfit(x, y, 1)
    off = y - (exponent * x + constant)
    return PowerLaw(float(exponent), float(np.exp(constant)), float(np.expm1(np.sqrt((off**2).mean()))), len(x))


def over_parameters(cells: Sequence[Cell], activity: str, length: int) -> PowerLaw | None:
    """Seconds a token over parameters, at one response length (0: of activities without one)."""
    of = measured(cells, activity, length=length)
    return power_law([cell.parameters for cell in of], [cell.seconds_per_token for cell in of])


def over_length(cells: Sequence[Cell], activity: str, size: str) -> PowerLaw | None:
    """Seconds a sample over response tokens, at one size."""
    of = [cell for cell in measured(cells, activity, size=size) if cell.length]
    return power_law([cell.length for cell in of], [cell.seconds_per_sample for cell in of])


def measured(
    cells: Sequence[Cell], activity: str, size: str | None = None, length: int | None = None
) -> list[Cell]:
    """Cells of an activity that have times, of one size or length where given."""
    return [cell for cell in cells if cell.activity == activity and cell.seconds
            and size in (None, cell.size) and length in (None, cell.length)]


def markdown(cells: Sequence[Cell]) -> str:
    """Both tables."""
    return f"{exponents(cells)}\n{times(cells)}"


def activities(cells: Sequence[Cell]) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(cell.activity for cell in cells))


def exponents(cells: Sequence[Cell]) -> str:
    """A row an activity: how its time grows with parameters and with length, and its process's memory."""
    largest = [size.name for size in SIZES if any(cell.size == size.name for cell in cells)]
    heads = ["activity", *(f"parameters, {length} tokens" for length in LENGTHS),
             *(f"length, {size}" for size in largest), "memory, MiB"]
    rows = []
    for activity in activities(cells):
        lengthless = all(not cell.length for cell in cells if cell.activity == activity)
        lengths = (0, *(None,) * (len(LENGTHS) - 1)) if lengthless else LENGTHS
        rows.append([
            activity,
            *("" if length is None else law(over_parameters(cells, activity, length)) for length in lengths),
            *(law(over_length(cells, activity, size)) for size in largest),
            memory(cells, activity, largest),
        ])
    return table(heads, rows)


def memory(cells: Sequence[Cell], activity: str, sizes: Sequence[str]) -> str:
    """Highest resident memory at each size."""
    peaks = [max((cell.peak_mib for cell in measured(cells, activity, size)), default=0.0) for size in sizes]
    return " / ".join(f"{peak:,.0f}" if peak else "-" for peak in peaks)


def times(cells: Sequence[Cell]) -> str:
    """A row an activity and size: milliseconds a sample at each length."""
    heads = ["activity", "model", *(f"{length} tokens, ms a sample" for length in LENGTHS)]
    rows = []
    for activity in activities(cells):
        for size in SIZES:
            of = {cell.length: cell for cell in cells if cell.activity == activity and cell.size == size.name}
            if 0 in of:
                rows.append([activity, size.name, f"{milliseconds(of[0])} in all", *[""] * (len(LENGTHS) - 1)])
            elif of:
                rows.append([activity, size.name, *(milliseconds(of[n]) if n in of else "-" for n in LENGTHS)])
    return table(heads, rows)


def milliseconds(cell: Cell) -> str:
    """Three significant digits."""
    if not cell.seconds:
        return f"over {CELL_S:.0f} s, skipped"
    value = cell.seconds_per_sample * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def law(found: PowerLaw | None) -> str:
    """The exponent, and how far off the law is, which two points cannot tell."""
    if found is None:
        return ""
    return f"{found.exponent:.2f} (±{found.residual:.0%})" if found.points > 2 else f"{found.exponent:.2f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; numbers to the right."""
    line = "|---|" + "---:|" * (len(heads) - 1)
    return "\n".join(["| " + " | ".join(heads) + " |", line, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#e08214", "#8c564b")
"""Paul Tol's bright scheme, and two more."""
FILE = "growth.svg"
LENGTH = 128
"""Response tokens of the rows whose time is drawn over parameters."""


def charts(cells: Sequence[Cell]) -> list[Chart]:
    """Three charts with the same key."""
    names, middle = activities(cells), middle_size(cells)

    def lines(points: dict[str, list[tuple[float, float]]]) -> list[Line]:
        return [Line(name, colour, points[name]) for name, colour in zip(names, COLOURS, strict=False)]

    by_size = {name: [(cell.parameters / 1e6, cell.seconds_per_token * 1000) for cell in measured(cells, name)
                      if cell.length == LENGTH] for name in names}
    by_length = {name: [(float(cell.length), cell.seconds_per_sample * 1000)
                        for cell in measured(cells, name, middle) if cell.length] for name in names}
    memory = {name: [(size.parameters / 1e6, max(cell.peak_mib for cell in of)) for size in SIZES
                     if (of := measured(cells, name, size.name))] for name in names}
    return [
        Chart(f"Time a token, responses of {LENGTH}", "million parameters", "milliseconds", lines(by_size), True),
        Chart(f"Time a sample, {middle} parameters", "response tokens", "milliseconds", lines(by_length), True),
        Chart("Highest memory of the role's process", "million parameters", "MiB", lines(memory), True),
    ]


def middle_size(cells: Sequence[Cell]) -> str:
    """The largest size but one, not to show overheads alone; of those measured whole, if there are some."""
    names = [size.name for size in SIZES if any(cell.size == size.name for cell in cells)]
    whole = [name for name in names if all(measured(cells, activity, name) for activity in activities(cells))]
    there = whole or names
    return there[-2] if len(there) > 2 else there[-1]


def write_plot(cells: Sequence[Cell], directory: Path) -> Path:
    """Write growth.svg; returns its path."""
    path = directory / FILE
    path.write_text(drawing(charts(cells)), encoding="utf-8")
    return path
