"""Tables for terminals and logs: numbers before and after a run, texts side by side, and where each worker runs."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_ray.errors import DataError
from rlhf_ray.observability.conversation import escaped, in_lines, turns_of
from rlhf_ray.observability.metric_catalogue import better, shown
from rlhf_ray.observability.progress import is_terminal
from rlhf_ray.observability.run_directory import read_json

PLAIN_WIDTH = 100
"""Characters per line of plain output."""


class Change(NamedTuple):
    """One metric before and after a run. None: not measured."""

    metric: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def verdict(self) -> str:
        """"better", "worse", or "" when the metric has no better direction, or did not change."""
        direction, difference = better(self.metric), self.difference
        if direction is None or not difference:
            return ""
        return "better" if (difference > 0) == (direction == "higher") else "worse"

    @property
    def share(self) -> float | None:
        """The difference over `before`; None where a percentage has no meaning: of scores, whose zero is arbitrary, and
        where `before` is negative or very small."""
        if self.metric.startswith(("reward", "gold")):
            return None
        share = self.difference / self.before if self.difference is not None and self.before else math.inf
        return share if (self.before or 0) > 0 and -1 <= share < 10 else None


def changes(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> list[Change]:
    """The two sides of an evaluation, metric by metric, in the order of `before`, as `metric_catalogue.shown`."""
    before = shown(before)
    after = shown(after)
    names = [*before, *(name for name in after if name not in before)]
    return [Change(name, before.get(name), after.get(name)) for name in names]


def print_before_after(
    rows: Iterable[Change], stream: TextIO | None = None, sides: tuple[str, str] = ("before", "after")
) -> None:
    """Print the change from before to after, or from one of two `sides` to the other: coloured in a terminal, aligned
    plain text elsewhere."""
    stream = stream or sys.stdout
    table = _table(not is_terminal(stream), "metric")
    for heading in (*sides, "change"):
        table.add_column(heading, justify="right")
    for row in rows:
        difference = "" if row.difference is None else f"{row.difference:+.4g}"
        style = {"better": "bold green", "worse": "bold red"}.get(row.verdict, "")
        change = f"{difference} {row.verdict}".strip()
        table.add_row(Text(row.metric), number(row.before), number(row.after), Text(change, style=style))
    _print(table, stream)


def print_numbers(numbers: Mapping[str, float | None], stream: TextIO | None = None) -> None:
    """Print metrics, a line each."""
    stream = stream or sys.stdout
    table = _table(not is_terminal(stream), "metric")
    table.add_column("value", justify="right")
    for name, value in numbers.items():
        table.add_row(Text(name), number(value))
    _print(table, stream)


def print_texts(texts: Sequence[Mapping[str, Any]], stream: TextIO | None = None) -> None:
    """Print texts with keys prompt (and messages, of a conversation), before, after side by side."""
    stream = stream or sys.stdout
    table = _table(not is_terminal(stream), "prompt", lines=True)
    table.add_column("before", ratio=2, overflow="fold")
    table.add_column("after", ratio=2, overflow="fold")
    for text in texts:
        # Text, not str: model output may contain markup or control codes of rich.
        sides = (escaped(text.get(key, "")) for key in ("before", "after"))
        table.add_row(Text(in_lines(turns_of(text))), *map(Text, sides))
    _print(table, stream)


def number(value: float | None) -> str:
    """Four significant digits; a dash for None."""
    return "–" if value is None else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """"1 turn", "2 turns"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def plain_table(*columns: str, **options: Any) -> Table:
    """A table without borders; arguments as of rich's."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)


def _table(plain: bool, first: str, lines: bool = False) -> Table:
    table = plain_table() if plain else Table(box=box.ROUNDED, show_lines=lines)
    table.add_column(first, ratio=1 if lines else None, overflow="fold")
    return table


def _print(table: Table, stream: TextIO) -> None:
    if is_terminal(stream):
        Console(file=stream).print(table)
        return
    # Rich pads plain rows at the end, which is useless in a log.
    console = Console(file=stream, force_terminal=False, color_system=None, width=PLAIN_WIDTH)
    with console.capture() as captured:
        console.print(table)
    stream.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())
    stream.flush()


WORKER_COLUMNS = ("node", "pool", "workers (process, GPUs)")


def workers_table(workers: Iterable[Mapping[str, Any]]) -> Table:
    """The workers in status.json: a line per pool and node with their processes and GPUs."""
    table = plain_table(*WORKER_COLUMNS)
    for row in _worker_rows(workers):
        table.add_row(*row)
    return table


def workers_text(status: Path) -> str:
    """The same as plain text, from a run's status.json; empty when it lists no workers."""
    try:
        rows = list(_worker_rows(read_json(status).get("workers", ())))
    except (OSError, DataError):
        return ""
    return "\n".join(f"{node}  {pool}: {workers}" for node, pool, workers in rows)


def _worker_rows(workers: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    by_place: dict[tuple[str, str], list[str]] = defaultdict(list)
    for worker in workers:
        gpus = f", GPU {'+'.join(worker['gpus'])}" if worker["gpus"] else ""
        by_place[f"{worker['host']} ({worker['node'][:8]})", worker["pool"]].append(
            f"{worker['worker']} ({worker['pid']}{gpus})")
    for (node, pool), here in sorted(by_place.items()):
        yield node, pool, ", ".join(here)
