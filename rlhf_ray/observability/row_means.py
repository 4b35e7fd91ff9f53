"""The rows of metrics of a long run as means of neighbouring rows, in memory that does not grow with the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any

from rlhf_ray.observability.metric_catalogue import NONE_IF_ABSENT

MOST = 3_000
"""Rows of each kind that are kept; up to this many rows in all stay as they are."""
ROWS = "rows"
"""Key of a mean's row: the number of rows that it stands for."""

Row = dict[str, Any]


class _Means:
    """The rows of one kind: the first and the last one, and means of all between them, of equally many each."""

    def __init__(self, first: Row) -> None:
        self.first, self.last = first, first
        self.means: list[Row] = []
        self._size = 1

    def add(self, row: Row) -> None:
        if self.last is not self.first:
            self._add_mean(self.last)
        self.last = row

    def _add_mean(self, row: Row) -> None:
        if self.means and self.means[-1].get(ROWS, 1) < self._size:
            self.means[-1] = _mean(self.means[-1], row)
        else:
            self.means.append(row)
        if len(self.means) == MOST:
            self.means = [_mean(*pair) for pair in zip(self.means[::2], self.means[1::2], strict=True)]
            self._size *= 2

    def rows(self) -> list[Row]:
        return [self.first, *self.means, *([] if self.last is self.first else [self.last])]


def thinned(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of their steps: all of them if they are few; otherwise, of each kind (a step's row, or an
    evaluation's), the first, the last, and means over equally many neighbours between them. A mean has the step and the
    time of the last of these, and their number as ROWS; values that are missing or null do not count."""
    rows = iter(rows)
    few = list(islice(rows, MOST))
    if len(few) < MOST:
        return few
    kinds: dict[frozenset[str], _Means] = {}
    for row in chain(few, rows):
        kind = frozenset(name.split("/")[0] for name in row)
        if kind in kinds:
            kinds[kind].add(row)
        else:
            kinds[kind] = _Means(row)
    return sorted((row for means in kinds.values() for row in means.rows()), key=lambda row: row["step"])


def mean_rate(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """The rate over the whole time of some steps: the mean weighted by their seconds. None if no row has it."""
    timed = [(row[name], row["time/step"] * row.get(ROWS, 1)) for row in rows
             if isinstance(row.get(name), (int, float)) and row.get("time/step")]
    seconds = sum(weight for _, weight in timed)
    return sum(value * weight for value, weight in timed) / seconds if seconds else None


def _mean(first: Row, second: Row) -> Row:
    """The mean of two rows, each a mean of as many as it says."""
    numbers = first.get(ROWS, 1), second.get(ROWS, 1)
    mean: Row = {"step": second["step"], "time": second.get("time"), ROWS: sum(numbers)}
    for name in dict.fromkeys((*first, *second)):
        if name not in mean:
            absent = 0.0 if name.startswith(NONE_IF_ABSENT) else None
            found = [(value, number) for row, number in zip((first, second), numbers, strict=True)
                     if isinstance(value := row.get(name, absent), (int, float))]
            weight = sum(number for _, number in found)
            mean[name] = sum(value * number for value, number in found) / weight if weight else None
    return mean
