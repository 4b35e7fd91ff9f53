"""Power laws through measured cells: least squares on logarithms, and how far off they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.growth.cells import Cell


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
