"""The model's answers drawn: for the page, and as one SVG."""

from collections.abc import Callable, Sequence
from pathlib import Path

import plotly.graph_objects as go

from benchmarks.cluster_model.check import Prediction
from benchmarks.cluster_model.prediction import Predicted, Sweep
from benchmarks.svg import Chart as Drawn
from benchmarks.svg import Line, drawing
from rlhf_ray.observability.report_charts import Chart

SVG = "cluster_model.svg"
COLOURS = ("#4477aa", "#ee6677", "#228833")
PAGE_COLOURS = ("reference", "policy", "generator")
CELL_COLOURS = ("generator", "weights", "reference", "reward", "policy", "accent", "assembler", "critic", "ink")


def page_charts(found: Sweep, checked: Sequence[Prediction]) -> list[Chart]:
    """Step and throughput of every model, and how well the formulas predict what was measured."""
    return [over_gpus("Step", "The batch stays the same, so a step gets shorter until its longest response is all that "
                      "is left.", "Seconds", found, lambda made: made.step.seconds),
            over_gpus("Throughput of a GPU", "Prompt and response tokens; a level line would be perfect scaling.",
                      "Tokens a second of one GPU", found, lambda made: made.tokens_per_gpu),
            *([accuracy(checked)] if checked else [])]


def points(made: Sequence[object], number: Callable[[Predicted], float]) -> list[tuple[float, float]]:
    """A number over GPUs, of those numbers of GPUs that fit."""
    return [(float(one.run.gpus), number(one)) for one in made if isinstance(one, Predicted)]


def over_gpus(title: str, about: str, axis: str, found: Sweep, number: Callable[[Predicted], float]) -> Chart:
    """A line for every model."""
    lines = [line(model, colour, points(made, number))
             for (model, made), colour in zip(found.items(), PAGE_COLOURS, strict=True)]
    return chart(title, about, lines, ("GPUs", axis), logarithmic=True)


def accuracy(found: Sequence[Prediction]) -> Chart:
    """Measured against predicted seconds, a point a cell."""
    data = []
    for activity, colour in zip(dict.fromkeys(p.cell.activity for p in found), CELL_COLOURS, strict=False):
        of = [p for p in found if p.cell.activity == activity]
        data.append(go.Scatter(mode="markers", name=activity, marker={"color": f"var(--{colour})", "size": 8},
                               x=[p.seconds / p.ratio for p in of], y=[p.seconds for p in of],
                               text=[f"{p.cell.size}, {p.cell.length} tokens: {p.ratio:.2f}" for p in of]))
    ends = [min(p.seconds for p in found), max(p.seconds for p in found)]
    same = line("equal", "soft", [(end, end) for end in ends])
    same.update(line={"dash": "dot", "width": 1.5})
    return chart("The formulas against measured roles", "One core, 1M to 100M parameters: a point is an activity at "
                 "one size and length. Above the line the formulas say too much.", [*data, same],
                 ("Measured seconds", "Predicted seconds"), logarithmic=True)


def line(name: str, colour: str, points: Sequence[tuple[float, float]]) -> go.Scatter:
    """A curve for plotly."""
    return go.Scatter(mode="lines+markers", name=name, x=[x for x, _ in points], y=[y for _, y in points],
                      line={"color": f"var(--{colour})", "width": 2}, marker_size=7)


def chart(
    title: str, about: str, data: list[go.Scatter | go.Bar], axes: tuple[str, str], logarithmic: bool = False
) -> Chart:
    """One card of the page."""
    x, y = ({"title_text": text, "type": "log" if logarithmic else None} for text in axes)
    return Chart(title, about, "Answers", "", data,
                 go.Layout(xaxis=x, yaxis=y, showlegend=True, hovermode="closest"))


def write_svg(found: Sweep, directory: Path) -> Path:
    """Step and throughput of a GPU over GPUs; returns the file's path."""
    def lines(number: Callable[[Predicted], float]) -> list[Line]:
        return [Line(model, colour, points(made, number))
                for (model, made), colour in zip(found.items(), COLOURS, strict=True)]

    path = directory / SVG
    path.write_text(drawing([
        Drawn("Step, the same batch", "GPUs", "seconds", lines(lambda made: made.step.seconds), True),
        Drawn("Throughput of a GPU", "GPUs", "tokens a second", lines(lambda made: made.tokens_per_gpu), True),
    ]), encoding="utf-8")
    return path
