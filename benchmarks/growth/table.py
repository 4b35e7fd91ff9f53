"""The study as Markdown: fitted exponents an activity, then every cell."""

from collections.abc import Sequence

from benchmarks.growth.cells import Cell
from benchmarks.growth.fit import PowerLaw, measured, over_length, over_parameters
from benchmarks.growth.settings import CELL_S, LENGTHS, SIZES


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
