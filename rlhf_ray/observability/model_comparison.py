"""Two models' answers to the same prompts, judged by one scorer: the data, the printed verdict, and the HTML page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from statistics import fmean, stdev
from typing import Any, TextIO

import plotly.graph_objects as go

from rlhf_ray.algorithms.win_rate import Z95, Outcome, WinRate
from rlhf_ray.observability.html_page import ASSETS, Tile, page
from rlhf_ray.observability.report_charts import Chart
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
    """For B."""

    @property
    def margin(self) -> float:
        """B's score minus A's."""
        return self.scores[1] - self.scores[0]


@dataclass(frozen=True)
class Comparison:
    """All pairs and the win rate."""

    names: tuple[str, str]
    """Models as named on the command line."""
    scorer: str
    prompts: int
    pairs: Sequence[Pair]
    rate: WinRate
    """Of B against A."""
    facts: Mapping[str, str]
    """How the answers were made, in words."""
    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Further numbers of A and of B, by name."""

    def means(self, column: str) -> tuple[float, float]:
        """Mean of a pair's numbers ("scores" or "tokens") over all pairs, for A and for B; NaN, the score of an episode
        that failed, is in none."""
        sides = zip(*(getattr(pair, column) for pair in self.pairs), strict=True)
        first, second = (_mean([number for number in side if not isnan(number)]) for side in sides)
        return first, second

    def margin(self) -> tuple[float, float, float]:
        """Mean margin of the pairs with two scores, and its 95 % interval by the normal approximation, with pairs
        assumed independent."""
        margins = [pair.margin for pair in self.scored]
        reach = Z95 * stdev(margins) / len(margins) ** 0.5 if len(margins) > 1 else float("nan")
        mean = _mean(margins)
        return mean, mean - reach, mean + reach

    @property
    def scored(self) -> list[Pair]:
        """The pairs with two scores."""
        return [pair for pair in self.pairs if not isnan(pair.margin)]

    def verdict(self) -> str:
        """Which side wins, in one sentence; a side wins only if the interval excludes one half."""
        rate = f"{self.rate.rate:.1%} (95 % interval {self.rate.low:.1%} to {self.rate.high:.1%})"
        if self.rate.low > 0.5:
            return f"B wins, with a win rate of {rate}"
        if self.rate.high < 0.5:
            return f"A wins: B has a win rate of {rate}"
        return f"neither is shown to be better: B has a win rate of {rate}"

    def summary(self) -> dict[str, Any]:
        """The result in plain numbers, and every pair."""
        (mean, low, high), scores, tokens = self.margin(), self.means("scores"), self.means("tokens")
        rate = self.rate
        return {
            "a": self.names[0], "b": self.names[1], "scorer": self.scorer, "prompts": self.prompts,
            "wins": rate.wins, "ties": rate.ties, "losses": rate.losses, "win_rate": rate.rate,
            "win_rate_interval": [rate.low, rate.high], "margin": mean,
            "margin_interval": [low, high] if len(self.scored) > 1 else None,
            "score": dict(zip("ab", scores, strict=True)), "tokens": dict(zip("ab", tokens, strict=True)),
            **{name: dict(zip("ab", both, strict=True)) for name, both in self.numbers.items()},
            "pairs": [{"prompt": p.prompt, "a": p.responses[0], "b": p.responses[1], "scores": list(p.scores),
                       "tokens": list(p.tokens), "outcome": p.outcome} for p in self.pairs],
        }


def print_comparison(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Print both models, means of both sides, wins, ties and losses, and the verdict."""
    stream = stream or sys.stdout
    rate, sides = comparison.rate, zip(SIDES, comparison.names, strict=True)
    stream.writelines(f"{side}: {name}\n" for side, name in sides)
    rows = [Change("score", *comparison.means("scores")), Change("tokens", *comparison.means("tokens")),
            *(Change(name, *both) for name, both in comparison.numbers.items())]
    print_before_after(rows, stream, SIDES)
    stream.write(f"B against A by {comparison.scorer}: {rate.wins} wins, {rate.ties} ties, {rate.losses} losses\n"
                 f"verdict: {comparison.verdict()}\n")
    stream.flush()


def _mean(numbers: Sequence[float]) -> float:
    return fmean(numbers) if numbers else nan


BINS = 40


def comparison_page(comparison: Comparison) -> str:
    """One self-contained HTML document."""
    c = comparison
    facts = {**dict(zip(SIDES, c.names, strict=True)), "Scorer": c.scorer, "Prompts": str(c.prompts), **c.facts}
    return page(ASSETS / "comparison.html", _charts(c), kind="Two models, the same prompts", title="B against A",
                lead=c.verdict() + ".", facts=facts, notes=_notes(c), tiles=_tiles(c), rate=c.rate, pairs=c.pairs)


def _tiles(c: Comparison) -> list[Tile]:
    rate, scores, tokens = c.rate, c.means("scores"), c.means("tokens")
    mean, low, high = c.margin()
    return [
        Tile("Win rate of B", f"{rate.rate:.1%}", f"95 % interval {rate.low:.1%} to {rate.high:.1%}"),
        Tile("Wins, ties, losses", f"{rate.wins} · {rate.ties} · {rate.losses}", f"of B, {len(c.pairs)} pairs"),
        Tile("Margin, mean", f"{mean:+.3g}", f"95 % interval {low:+.3g} to {high:+.3g}"),
        Tile("Score, mean", f"{scores[0]:.3g} → {scores[1]:.3g}", "A → B"),
        *(Tile(name.capitalize(), f"{a:.3g} → {b:.3g}", "A → B") for name, (a, b) in c.numbers.items()),
        Tile("Length, mean", f"{tokens[0]:.1f} → {tokens[1]:.1f}", "tokens, A → B"),
    ]


def _notes(c: Comparison) -> list[str]:
    """Reasons for doubt."""
    a, b = c.means("tokens")
    if min(a, b) > 0 and max(a, b) / min(a, b) > 1.5:
        longer = "A" if a > b else "B"
        return [f"{longer} answers at much greater length; many scorers favour length. Look at the texts."]
    return []


def _charts(c: Comparison) -> list[Chart]:
    first, second = ([pair.scores[side] for pair in c.scored] for side in (0, 1))
    low = min((*first, *second), default=0.0)
    high = max((*first, *second), default=0.0)
    margins = _chart(
        "Margin", "How much higher B is scored, pair by pair. Right of zero B wins.",
        [_histogram([pair.margin for pair in c.scored], "policy", "pairs")],
        ("B's score minus A's", "Pairs"), showlegend=False,
    )
    scores = _chart(
        "Scores", "A pair is a point: above the line B is scored higher.",
        [go.Scatter(mode="markers", x=first, y=second, name="pairs", marker={"color": "var(--policy/60)", "size": 7}),
         go.Scatter(mode="lines", x=[low, high], y=[low, high], name="equal", hoverinfo="skip",
                    line={"color": "var(--soft)", "width": 1, "dash": "dot"})],
        ("A's score", "B's score"), showlegend=False, hovermode="closest",
    )
    lengths = _chart(
        "Lengths", "Tokens of the answers. A scorer that likes long answers shows here.",
        [_histogram([pair.tokens[side] for pair in c.pairs], colour, SIDES[side], opacity=0.6)
         for side, colour in enumerate(("reference", "policy"))],
        ("Tokens", "Answers"), showlegend=True, barmode="overlay",
    )
    return [margins, scores, lengths]


def _histogram(values: list[float], colour: str, name: str, **more: Any) -> go.Histogram:
    return go.Histogram(x=values, nbinsx=BINS, marker_color=f"var(--{colour})", name=name, **more)


def _chart(title: str, healthy: str, data: list[go.Scatter | go.Histogram], axes: tuple[str, str],
           **layout: Any) -> Chart:
    return Chart(title, healthy, "Numbers", "", data,
                 go.Layout(xaxis_title_text=axes[0], yaxis_title_text=axes[1], **layout))
