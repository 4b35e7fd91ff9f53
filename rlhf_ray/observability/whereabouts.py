"""Where each worker of a run lives: node, pool, process and GPUs, as status.json has it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

COLUMNS = ("node", "pool", "workers (process, GPUs)")


def whereabouts_table(workers: Iterable[Mapping[str, Any]]) -> Table:
    """A line for each pool on each node."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column)
    for row in _rows(workers):
        table.add_row(*row)
    return table


def whereabouts_text(status: Path) -> str:
    """The same as plain text, from a run's status.json; empty where it tells of no workers."""
    try:
        rows = list(_rows(json.loads(status.read_text()).get("workers", ())))
    except (OSError, ValueError):
        return ""
    return "\n".join(f"{node}  {pool}: {workers}" for node, pool, workers in rows)


def _rows(workers: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for worker in workers:
        gpus = f", GPU {'+'.join(worker['gpus'])}" if worker["gpus"] else ""
        found[f"{worker['host']} ({worker['node'][:8]})", worker["pool"]].append(
            f"{worker['worker']} ({worker['pid']}{gpus})")
    for (node, pool), here in sorted(found.items()):
        yield node, pool, ", ".join(here)
