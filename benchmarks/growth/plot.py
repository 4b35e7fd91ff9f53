"""The study as one drawing: time over parameters, time over length, memory."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.growth.cells import Cell
from benchmarks.growth.fit import measured
from benchmarks.growth.settings import SIZES
from benchmarks.growth.table import activities
from benchmarks.svg import Chart, Line, drawing

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
