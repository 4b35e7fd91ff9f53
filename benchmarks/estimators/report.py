"""Outcomes as a table (Markdown), as data (JSON), and as a plot: gold over samples, and gold over KL."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.estimators.outcome import TARGET, WINDOW, Outcome, Spread, spread
from benchmarks.svg import Chart, Line, drawing

HEADINGS = ("estimator", "seeds", "gold before", "gold after", "KL after", f"samples to gold {TARGET:g}", "seconds",
            "distinct", "distinct pairs", "learned")

Outcomes = Mapping[str, Sequence[Outcome]]
"""Estimator -> its outcomes, one a seed."""


def markdown(outcomes: Outcomes) -> str:
    """A row an estimator: means over seeds ± sample deviation."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|---{'|---:' * (len(HEADINGS) - 1)}|"]
    lines += [f"| {' | '.join(row(name, of))} |" for name, of in outcomes.items() if of]
    return "\n".join(lines) + "\n"


def row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """The cells of one estimator."""
    return [
        f"`{name}`", " ".join(str(o.seed) for o in outcomes),
        shown(spread(outcomes, lambda o: o.gold_before), 3), shown(spread(outcomes, lambda o: o.gold_after), 3),
        shown(spread(outcomes, lambda o: o.kl_after), 2), samples_cell(outcomes),
        shown(spread(outcomes, lambda o: o.seconds), 0), shown(spread(outcomes, lambda o: o.distinct), 2),
        shown(spread(outcomes, lambda o: o.distinct_bigrams), 3),
        f"{sum(o.learned for o in outcomes)}/{len(outcomes)}",
    ]


def samples_cell(outcomes: Sequence[Outcome]) -> str:
    """Mean samples of the seeds that reached the target, and how many did where not all."""
    reached = [n for o in outcomes if (n := o.samples_to_target) is not None]
    if not reached:
        return "not reached"
    some = "" if len(reached) == len(outcomes) else f" ({len(reached)} of {len(outcomes)})"
    return f"{sum(reached) / len(reached):,.0f}{some}"


def shown(value: Spread, digits: int) -> str:
    """A mean, and its deviation where there is one."""
    deviation = f" ± {value.deviation:.{digits}f}" if value.deviation else ""
    return f"{value.mean:.{digits}f}{deviation}"


def write_tables(outcomes: Outcomes, machine: Mapping[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write estimators.md and estimators.json (every outcome with its curves, and the machine); returns their paths."""
    page, data = directory / "estimators.md", directory / "estimators.json"
    note = (f"Means over seeds ± sample deviation; gold, KL and shares on 512 held-out prompts. Samples to gold "
            f"{TARGET:g}: until the mean of {WINDOW} batches reached it.\n")
    page.write_text(f"{markdown(outcomes)}\n{note}", encoding="utf-8")
    data.write_text(json.dumps({
        "machine": dict(machine),
        "outcomes": [{**asdict(o), "samples_to_target": o.samples_to_target, "learned": o.learned}
                     for of in outcomes.values() for o in of],
    }, indent=1) + "\n", encoding="utf-8")
    return page, data


COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")
"""Paul Tol's bright scheme, told apart by colour-blind readers too."""
SMOOTHING = 3
"""Steps averaged for one point of a curve."""


def charts(outcomes: Outcomes) -> list[Chart]:
    """Gold over samples, and gold over KL; each curve is a mean over seeds."""
    named = [(name, of, colour) for (name, of), colour in zip(outcomes.items(), COLOURS, strict=False) if of]
    return [
        Chart("Gold score of each step's batch", "samples", "gold", [
            Line(name, colour, list(zip(of[0].samples, curve(of, "gold"), strict=True)))
            for name, of, colour in named]),
        Chart("The same over its price", "KL to the SFT model, nats a response", "gold", [
            Line(name, colour, list(zip(curve(of, "kl"), curve(of, "gold"), strict=True)))
            for name, of, colour in named]),
    ]


def curve(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """A column of the runs: mean over seeds, then over up to `SMOOTHING` steps that end at each."""
    steps = min(len(getattr(o, name)) for o in outcomes)
    values = [mean(getattr(o, name)[i] for o in outcomes) for i in range(steps)]
    return [mean(values[max(0, i + 1 - SMOOTHING) : i + 1]) for i in range(steps)]


def write_plots(outcomes: Outcomes, directory: Path) -> tuple[Path, Path]:
    """Write estimators.html (interactive, self-contained) and estimators.svg; returns their paths."""
    made = charts(outcomes)
    html, svg = directory / "estimators.html", directory / "estimators.svg"
    svg.write_text(drawing(made), encoding="utf-8")
    html.write_text(interactive(made), encoding="utf-8")
    return html, svg


def interactive(made: Sequence[Chart]) -> str:
    """The charts side by side as one page that holds plotly.js itself; the first chart's lines are the key for all."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(1, len(made), subplot_titles=[chart.title for chart in made])
    for column, chart in enumerate(made, start=1):
        figure.add_traces([Scatter(mode="lines", name=line.name, legendgroup=line.name, showlegend=column == 1,
                                   x=[x for x, _ in line.points], y=[y for _, y in line.points],
                                   line_color=line.colour) for line in chart.lines], rows=1, cols=column)
        figure.update_xaxes(title_text=chart.x, rangemode="tozero", col=column)
        figure.update_yaxes(title_text=chart.y, rangemode="tozero", col=column)
    figure.update_layout(template="none", legend={"orientation": "h", "y": -0.3})
    plots = figure.to_html(full_html=False, config={"responsive": True}, default_height="min(95vh,640px)")
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Estimators</title></head>\n'
            f"<body>{plots}</body></html>\n")
