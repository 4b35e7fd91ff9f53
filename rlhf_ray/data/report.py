"""What became of the rows of a data set while it was loaded: every row is kept or named here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import DataError

NAMED_LINES = 5
"""Line numbers spelled out per reason; the others are counted."""


@dataclass(frozen=True)
class LoadReport:
    """Rows read, rows kept, and the lines of the rows left out by reason."""

    source: str
    rows: int
    kept: int
    left_out: dict[str, list[int]]
    """Reason to line numbers (all of them), in file order. Reasons that left nothing out are absent."""

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.kept} of {self.rows} rows used"]
        for reason, lines in self.left_out.items():
            named = ", ".join(map(str, lines[:NAMED_LINES])) + (", ..." if len(lines) > NAMED_LINES else "")
            parts.append(f"{len(lines)} left out: {reason} (line{'s' if len(lines) > 1 else ''} {named})")
        return "; ".join(parts)


def keep_rows(rows: Rows, reasons: dict[str, NDArray[np.bool_]], fix: str) -> tuple[NDArray[np.int64], LoadReport]:
    """The numbers `[K]` of the rows that no reason leaves out, and the report; a row counts for its first reason.

    Args:
        reasons: what is wrong, to `[N]` True where it is.
        fix: what to do when nothing is left.

    Raises:
        DataError: no row is left.
    """
    out = np.zeros(len(rows), dtype=bool)
    left_out: dict[str, list[int]] = {}
    for reason, wrong in reasons.items():
        if (fresh := np.flatnonzero(wrong & ~out)).size:
            left_out[reason] = [rows.lines[i] for i in fresh]
        out |= wrong
    report = LoadReport(rows.source, len(rows), int((~out).sum()), left_out)
    if not report.kept:
        raise DataError(f"no row is left. {report}. {fix}")
    return np.flatnonzero(~out), report


