"""Figures as a table for people and as a file for programs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.comparison import Comparison

UNDISTURBED_SHARE = 0.95
"""Share of a CPU that turns on a quiet machine get at least."""


def print_table(results: Mapping[str, Comparison], machine: Mapping[str, Any]) -> None:
    """Both sides and their ratio, a row a benchmark, and a warning if the machine had other work."""
    table = Table(title=f"{machine['cores']} cores, {machine['cpu']}", title_justify="left")
    for column in ("benchmark", "ours", "other side", "ratio", "lowest - highest", "better"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for name, result in results.items():
        benchmark = result.benchmark
        table.add_row(
            name, f"{shown(result.ours, benchmark.unit)}\n[dim]{benchmark.ours_is}",
            f"{shown(result.theirs, benchmark.unit)}\n[dim]{benchmark.theirs_is}", f"[bold]{result.ratio:.2f}",
            f"{min(result.ratios):.2f} - {max(result.ratios):.2f}", better(benchmark.unit), end_section=True)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    disturbed = [name for name, result in results.items() if result.cpu_share < UNDISTURBED_SHARE]
    if disturbed:
        console.print(f"[yellow]Other processes took part of the cores during {', '.join(disturbed)} (load average "
                      f"{machine['load_average_1min']} at the start): run again on a quiet machine.")


def write_summary(results: Mapping[str, Comparison], machine: Mapping[str, Any], directory: Path) -> Path:
    """Write `summary.json`: each benchmark's ratio by its name, `details` with both sides, and the machine."""
    summary: dict[str, Any] = {name: result.ratio for name, result in results.items()}
    summary["details"] = {name: details(result) for name, result in results.items()}
    summary["machine"] = dict(machine)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return path


def details(result: Comparison) -> dict[str, Any]:
    """What stands behind one ratio."""
    benchmark = result.benchmark
    return {
        "ours": result.ours, "ours_is": benchmark.ours_is, "theirs": result.theirs, "theirs_is": benchmark.theirs_is,
        "unit": benchmark.unit, "better": better(benchmark.unit), "repeats": len(result.ratios),
        "ratios": result.ratios, "cpu_share": result.cpu_share,
        "disturbed": result.cpu_share < UNDISTURBED_SHARE,
    }


def better(unit: str) -> str:
    """Which ratios speak for our side."""
    return "lower" if unit == "s" else "higher"


def shown(value: float, unit: str) -> str:
    """A measured number with its unit."""
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3f} {unit}"
