"""Win rate of one of two models over the other, from paired scores, with a confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

Outcome = Literal["win", "tie", "loss"]
Z95 = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""


@dataclass(frozen=True)
class WinRate:
    """The second of two sides against the first."""

    wins: int
    ties: int
    losses: int
    rate: float
    """Mean over prompts of (wins + ties / 2) / pairs: 0.5 where neither side is better."""
    low: float
    high: float
    """95 % interval of `rate`."""


def outcome(first: float, second: float, tie: float = 0.0) -> Outcome:
    """The outcome for the second side; scores at most `tie` apart are a tie.

    Raises:
        ValueError: a score is NaN, which neither wins nor loses.
    """
    margin = second - first
    if margin != margin:
        raise ValueError(f"scores {first} and {second} cannot be compared")
    return "tie" if abs(margin) <= tie else "win" if margin > 0 else "loss"


def outcome_or_failed(first: float, second: float, tie: float = 0.0) -> Outcome:
    """`outcome`, where NaN is the score of an episode that failed: it loses against any score, and two are a tie."""
    if math.isnan(first) or math.isnan(second):
        failed = math.isnan(first), math.isnan(second)
        return "tie" if all(failed) else "win" if failed[0] else "loss"
    return outcome(first, second, tie)


def win_rate(outcomes: Sequence[Sequence[Outcome]]) -> WinRate:
    """The rate over prompts, each with the outcomes of its pairs. A tie is half a win for either side.

    Pairs of one prompt are not independent, so the interval counts prompts: every prompt gives one number in [0, 1],
    the mean of its pairs. Such a number varies no more than a Bernoulli variable of the same mean, so Wilson's interval
    is conservative here (with ties, or several pairs a prompt).

    Raises:
        ValueError: no prompts, or a prompt without pairs.
    """
    worth = {"win": 1.0, "tie": 0.5, "loss": 0.0}
    if not outcomes or not all(outcomes):
        raise ValueError("a win rate needs at least one pair for each of one or more prompts")
    rate = sum(sum(worth[o] for o in pairs) / len(pairs) for pairs in outcomes) / len(outcomes)
    low, high = wilson_interval(rate, len(outcomes))
    flat = [o for pairs in outcomes for o in pairs]
    return WinRate(flat.count("win"), flat.count("tie"), flat.count("loss"), rate, low, high)


def wilson_interval(rate: float, trials: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927): the p with |rate - p| <= z sqrt(p (1 - p) / trials).

    Unlike rate ± z sqrt(rate (1 - rate) / trials) it stays inside [0, 1] and says something when all trials agree.

    Raises:
        ValueError: no trials, or a rate outside [0, 1].
    """
    if trials < 1 or not 0 <= rate <= 1:
        raise ValueError(f"no interval for a rate of {rate} over {trials} trials")
    shrink = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    reach = z * sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    return max(0.0, centre - reach), min(1.0, centre + reach)
