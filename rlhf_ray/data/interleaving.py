"""In which order several sources take turns so that every stretch of turns holds each close to its share."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Interleaving:
    """Turns of sources by weight, without randomness: at any moment, each source's number of turns differs from its
    exact share by less than one (Tijdeman 1980, "The chairman assignment problem": by at most 1 - 1/(2k-2), for k
    sources). All arithmetic is in whole numbers, so it is the same after any number of turns and on every machine.

    Args:
        weights: positive, of any sum; taken for the decimal numbers they are written as.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._total = sum(self._weights)
        common = lcm(*self._weights)
        self._patience = [common // weight for weight in self._weights]

    def next(self, turns: Sequence[int]) -> int:
        """Whose turn it is after each source had so many `turns`, by these rules alone.

        Of the sources that may have one (their share is far enough ahead of their turns), the one whose turn would
        first be late.
        """
        if len(self._weights) == 1:
            return 0
        now, slack = sum(turns) + 1, 2 * len(self._weights) - 2
        may = [i for i, weight in enumerate(self._weights)
               if slack * (weight * now - turns[i] * self._total) >= self._total]
        return min(may, key=lambda i: ((slack * (turns[i] + 1) - 1) * self._patience[i], i))
