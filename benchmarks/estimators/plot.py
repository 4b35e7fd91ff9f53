"""One plot of all estimators: how gold grows with samples, and what KL it costs."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.estimators.outcome import Outcome
from benchmarks.estimators.table import Outcomes
from benchmarks.svg import Chart, Line, drawing

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
    """The charts as one page that holds plotly.js itself."""
    from plotly.offline import get_plotlyjs

    figure = json.dumps({"data": [trace for i, chart in enumerate(made) for trace in traces(chart, i)],
                         "layout": layout(made)})
    draw = f'const figure={figure};Plotly.newPlot("plot",figure.data,figure.layout,{{responsive:true}})'
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Estimators</title></head>\n<body>'
            '<div id="plot" style="height:min(95vh,640px)"></div>\n'
            f"<script>{get_plotlyjs()}</script>\n<script>{draw}</script></body></html>\n")


def traces(chart: Chart, place: int) -> list[dict[str, object]]:
    """A chart's lines for plotly, in the `place`-th pair of axes; the first chart's are the key for all."""
    axis = "" if place == 0 else str(place + 1)
    return [{"type": "scatter", "mode": "lines", "name": line.name, "legendgroup": line.name, "showlegend": place == 0,
             "x": [x for x, _ in line.points], "y": [y for _, y in line.points], "line": {"color": line.colour},
             "xaxis": f"x{axis}", "yaxis": f"y{axis}"} for line in chart.lines]


def layout(made: Sequence[Chart]) -> dict[str, object]:
    """Axes side by side, each under its title, and the key below them."""
    found: dict[str, object] = {"template": "none", "legend": {"orientation": "h", "y": -0.3}, "annotations": [
        {"text": f"<b>{chart.title}</b>", "x": i / len(made), "y": 1.1, "xref": "paper", "yref": "paper",
         "xanchor": "left", "showarrow": False} for i, chart in enumerate(made)]}
    for i, chart in enumerate(made):
        axis, share = "" if i == 0 else str(i + 1), 1 / len(made)
        found[f"xaxis{axis}"] = {"title": {"text": chart.x}, "domain": [i * share, (i + 0.88) * share],
                                 "anchor": f"y{axis}", "rangemode": "tozero"}
        found[f"yaxis{axis}"] = {"title": {"text": chart.y}, "anchor": f"x{axis}", "rangemode": "tozero"}
    return found
