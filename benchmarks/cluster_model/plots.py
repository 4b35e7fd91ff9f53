"""The model's answers drawn: for the page, and as one SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from benchmarks.cluster_model.check import Prediction
from benchmarks.cluster_model.gpu_split import STALENESS, Answer, Step
from benchmarks.svg import Chart as Drawn
from benchmarks.svg import Line, drawing
from rlhf_ray.observability.report_charts import Chart

SVG = "cluster_model.svg"
COLOURS = {0: "#4477aa", 1: "#ee6677", 2: "#228833", 3: "#aa3377", 4: "#ccbb44"}
PAGE_COLOURS = {0: "reference", 1: "generator", 2: "policy", 3: "reward", 4: "weights"}
CELL_COLOURS = ("generator", "weights", "reference", "reward", "policy", "accent", "assembler", "critic", "ink")
PARTS = {"generation": "generator", "scoring": "reward", "training": "policy", "publishing": "weights"}


def page_charts(answers: Sequence[Answer], found: Sequence[Prediction]) -> list[Chart]:
    """Throughput, the parts of a step, and how well the formulas predict what was measured."""
    return [throughput(answers), parts(answers), *([accuracy(found)] if found else [])]


def throughput(answers: Sequence[Answer]) -> Chart:
    """Samples a second over GPUs, a line a staleness, beside perfect scaling."""
    first = answers[0].recommended
    data = [line(f"staleness {staleness}", PAGE_COLOURS[staleness],
                 [(answer.gpus, made.samples_per_second) for answer in answers
                  for made in answer.by_staleness if made.split.staleness == staleness]) for staleness in STALENESS]
    ideal = line("perfect scaling", "soft", [
        (answer.gpus, first.samples_per_second * answer.gpus / answers[0].gpus) for answer in answers])
    ideal.update(line={"dash": "dot", "width": 1.5})
    made = chart("Samples a second", "The batch stays the same, so a step gets shorter until its longest response is "
                 "all that is left. Lines that part show what staleness is worth.", [*data, ideal],
                 ("GPUs", "Samples a second"), logarithmic=True)
    counts = [answer.gpus for answer in answers]
    made.layout.update(xaxis={"tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}, yaxis_dtick="D2")
    return made


def parts(answers: Sequence[Answer]) -> Chart:
    """Work in a step of the recommended split."""
    best = [answer.recommended for answer in answers]
    names = [f"{answer.gpus:,}" for answer in answers]
    data = [go.Bar(x=names, y=[getattr(made, part) for made in best], name=part, marker_color=f"var(--{colour})")
            for part, colour in PARTS.items()]
    data.append(go.Scatter(mode="markers", x=names, y=[made.seconds for made in best], name="whole step",
                           marker={"color": "var(--ink)", "symbol": "line-ew-open", "size": 26}))
    made = chart("Where the time goes", "The recommended split of each number of GPUs. Bars above the mark are work "
                 "that pools do side by side.", data, ("GPUs", "Seconds"))
    made.layout.update(barmode="stack", xaxis_type="category")
    return made


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


def write_svg(answers: Sequence[Answer], directory: Path) -> Path:
    """Throughput over GPUs and the share of them that generate best; returns the file's path."""
    def lines(number: Any) -> list[Line]:
        return [Line(f"staleness {staleness}", COLOURS[staleness], [
            (float(answer.gpus), number(made)) for answer in answers for made in answer.by_staleness
            if made.split.staleness == staleness]) for staleness in STALENESS]

    def share(made: Step) -> float:
        return 100 * made.split.generators / (made.split.generators + made.split.learners)

    path = directory / SVG
    path.write_text(drawing([
        Drawn("70B policy: samples a second", "GPUs", "samples a second", lines(lambda m: m.samples_per_second), True),
        Drawn("Step", "GPUs", "seconds", lines(lambda m: m.seconds), True),
        Drawn("Best share of generators", "GPUs", "%", lines(share)),
    ]), encoding="utf-8")
    return path
