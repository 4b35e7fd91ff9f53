"""Two models' answers to the same prompts, judged by one scorer: what a person is told on a terminal and in a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TextIO

from rlhf_ray.algorithms.win_rate import Z95, Outcome, WinRate
from rlhf_ray.observability.tables import Change, print_before_after

SIDES = ("A", "B")


@dataclass(frozen=True)
class Pair:
    """Answers of A and of B to one prompt, drawn with the same seed."""

    prompt: str
    responses: tuple[str, str]
    scores: tuple[float, float]
    tokens: tuple[int, int]
    outcome: Outcome
    """Of B."""

    @property
    def margin(self) -> float:
        """How much higher B is scored."""
        return self.scores[1] - self.scores[0]


@dataclass(frozen=True)
class Comparison:
    """All pairs and who won."""

    names: tuple[str, str]
    """Models as they were named."""
    scorer: str
    prompts: int
    pairs: Sequence[Pair]
    rate: WinRate
    """Of B against A."""
    facts: Mapping[str, str]
    """How the answers came about, in words."""

    def means(self, column: str) -> tuple[float, float]:
        """Mean of a pair's numbers ("scores" or "tokens") over all pairs, for A and for B."""
        sides = zip(*(getattr(pair, column) for pair in self.pairs), strict=True)
        first, second = (fmean(side) for side in sides)
        return first, second

    def margin(self) -> tuple[float, float, float]:
        """Mean margin and its 95 % interval by the normal approximation, pairs taken as independent."""
        margins = [pair.margin for pair in self.pairs]
        reach = Z95 * stdev(margins) / len(margins) ** 0.5 if len(margins) > 1 else float("nan")
        mean = fmean(margins)
        return mean, mean - reach, mean + reach

    def verdict(self) -> str:
        """Who won, in one sentence; a side only wins where the interval leaves out one half."""
        rate = f"{self.rate.rate:.1%} (95 % interval {self.rate.low:.1%} to {self.rate.high:.1%})"
        if self.rate.low > 0.5:
            return f"B wins, with a win rate of {rate}"
        if self.rate.high < 0.5:
            return f"A wins: B has a win rate of {rate}"
        return f"neither is shown to be better: B has a win rate of {rate}"

    def summary(self) -> dict[str, Any]:
        """The outcome in plain numbers, and every pair."""
        (mean, low, high), scores, tokens = self.margin(), self.means("scores"), self.means("tokens")
        rate = self.rate
        return {
            "a": self.names[0], "b": self.names[1], "scorer": self.scorer, "prompts": self.prompts,
            "wins": rate.wins, "ties": rate.ties, "losses": rate.losses, "win_rate": rate.rate,
            "win_rate_interval": [rate.low, rate.high], "margin": mean, "margin_interval": [low, high],
            "score": dict(zip("ab", scores, strict=True)), "tokens": dict(zip("ab", tokens, strict=True)),
            "pairs": [{"prompt": p.prompt, "a": p.responses[0], "b": p.responses[1], "scores": list(p.scores),
                       "tokens": list(p.tokens), "outcome": p.outcome} for p in self.pairs],
        }


def print_comparison(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Means of both sides, wins, ties and losses, and the verdict."""
    stream = stream or sys.stdout
    rate, sides = comparison.rate, zip(SIDES, comparison.names, strict=True)
    stream.writelines(f"{side}: {name}\n" for side, name in sides)
    rows = [Change("score", *comparison.means("scores")), Change("tokens", *comparison.means("tokens"))]
    print_before_after(rows, stream, SIDES)
    stream.write(f"B against A by {comparison.scorer}: {rate.wins} wins, {rate.ties} ties, {rate.losses} losses\n"
                 f"verdict: {comparison.verdict()}\n")
    stream.flush()
