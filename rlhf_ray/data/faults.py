"""Rows that cannot be used, remembered while the others are read, so that a person hears of all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlhf_ray.data.report import LoadReport
from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import RLHFError

T = TypeVar("T")
MOST = 20
"""Faults after which reading stops: a file of a million rows with a misspelt column needs no million messages."""



class Faults:
    """Malformed rows of one data set.

    Args:
        lenient: count them all and go on, for showing a data set. Training does not go on: a row that cannot be read is
            an error in the data, unlike one that is too long.
    """

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.count = 0
        self._sources: list[str] = []
        self._found: list[tuple[int, int, RLHFError]] = []

    @property
    def first(self) -> list[RLHFError]:
        """The first of them that were found, MOST at most, in the order of their files and lines."""
        return [fault for *_, fault in self._in_order()]

    @property
    def told(self) -> list[str]:
        """What is wrong with `first`, and where: what is wrong with several rows of a file in the same way is said
        once, with their lines."""
        lines: dict[tuple[str, str], list[int]] = {}
        for number, line, fault in self._in_order():
            source = self._sources[number]
            lines.setdefault((source, str(fault).removeprefix(f"{source}, line {line}")), []).append(line)
        return [_placed(source, text, found) for (source, text), found in lines.items()]

    def _in_order(self) -> list[tuple[int, int, RLHFError]]:
        return sorted(self._found, key=lambda found: found[:2])

    def add(self, fault: RLHFError, source: str, line: int) -> None:
        """Remember a fault; in training, the last straw is raised by `check`."""
        if source not in self._sources:
            self._sources.append(source)
        self.count += 1
        if self.count <= MOST:
            self._found.append((self._sources.index(source), line, fault))
        if not self.lenient and self.count == MOST:
            self.check()

    def values(self, rows: Rows, read: Callable[[Rows, int], T]) -> tuple[Rows, list[T]]:
        """The rows that could be read, and what `read` made of each; the others are remembered."""
        good, values = [], []
        for i in range(len(rows)):
            try:
                values.append(read(rows, i))
                good.append(i)
            except RLHFError as fault:
                self.add(fault, rows.source, rows.lines[i])
        return (rows if len(good) == len(rows) else rows.select(good)), values

    @property
    def hopeless(self) -> bool:
        """Whether training cannot start any more, so that only further faults are of interest."""
        return self.count > 0 and not self.lenient

    def finish(self, report: LoadReport, fix: str) -> None:
        """All rows are read: check that none was malformed and some are left, unless lenient.

        Args:
            fix: what to do when nothing is left.

        Raises:
            DataError, ModelError: rows cannot be used, or no row is left.
        """
        self.check()
        if not self.lenient:
            report.require_rows(fix)

    def check(self) -> None:
        """Raise what was found: a single fault as it is, several as one error that names each, or each
        kind where many are of one.

        Raises:
            DataError, ModelError: rows cannot be used.
        """
        if not self.hopeless:
            return
        if self.count == 1:
            raise self.first[0]
        stopped = "; reading stopped there" if self.count >= MOST else ""
        listed = "\n".join(f"  {fault}" for fault in self.told)
        raise type(self.first[0])(f"{self.count} rows cannot be used{stopped}:\n{listed}")


def _placed(source: str, text: str, lines: list[int]) -> str:
    """`text` with the place of its rows before it; a text that speaks of the whole file stands as it is."""
    if not text.startswith(":"):
        return text
    return f"{source}, line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}{text}"
