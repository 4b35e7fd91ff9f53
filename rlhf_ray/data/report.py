"""What became of the rows of a data set while it was loaded: every row is kept, or counted here under a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import DataError

NAMED_LINES = 5
"""Line numbers that the sentence spells out per reason."""
REMEMBERED_LINES = 100
"""Line numbers kept per reason; the others are counted, so that a report of millions of rows stays small."""


@dataclass
class LeftOut:
    """Rows left out for one reason."""

    count: int = 0
    lines: list[int | str] = field(default_factory=list)
    """Line numbers of the first of them, in file order; "file:line" where a data set has several files."""

    def __str__(self) -> str:
        return self.named(NAMED_LINES)

    def named(self, most: int) -> str:
        """Their first lines in words."""
        named = ", ".join(map(str, self.lines[:most])) + (", ..." if self.count > most else "")
        return f"line{'s' if self.count > 1 else ''} {named}"


@dataclass
class LoadReport:
    """Rows read, rows kept, and the lines of rows left out by reason. Grows block by block while rows are read."""

    source: str
    rows: int = 0
    kept: int = 0
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """By reason, in the order in which reasons were first met. Reasons that left nothing out are absent."""
    held_out: int = 0
    """Of those kept, how many are not trained on."""

    def __str__(self) -> str:
        held_out = f", {self.held_out} of them held out" if self.held_out else ""
        parts = [f"{self.source}: {self.kept} of {self.rows} rows used{held_out}"]
        parts += [f"{found.count} left out: {reason} ({found})" for reason, found in self.left_out.items()]
        return "; ".join(parts)

    def keep(self, rows: Rows, reasons: dict[str, NDArray[np.bool_]]) -> NDArray[np.int64]:
        """The numbers `[K]` of the rows of a block that no reason leaves out; a row counts for its first reason.

        Args:
            reasons: what is wrong, to `[N]` True where it is.
        """
        out = np.zeros(len(rows), dtype=bool)
        for reason, wrong in reasons.items():
            if (fresh := np.flatnonzero(wrong & ~out)).size:
                found = self.left_out.setdefault(reason, LeftOut())
                found.count += len(fresh)
                found.lines += [self._line(rows, int(i)) for i in fresh[: REMEMBERED_LINES - len(found.lines)]]
            out |= wrong
        self.rows += len(rows)
        self.kept += int((~out).sum())
        return np.flatnonzero(~out)

    def _line(self, rows: Rows, i: int) -> int | str:
        return rows.lines[i] if rows.source == self.source else f"{Path(rows.source).name}:{rows.lines[i]}"

    def require_rows(self, fix: str) -> None:
        """Check that something is left to train on.

        Args:
            fix: what to do when nothing is left.

        Raises:
            DataError: no row is left.
        """
        if not self.kept:
            raise DataError(f"no row is left. {self}. {fix}")
