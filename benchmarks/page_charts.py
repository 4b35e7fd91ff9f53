"""The page's plots: all figures beside their goals, and each figure repeat by repeat."""

import plotly.graph_objects as go

from benchmarks.figure import Figure, is_ratio, shown, shown_goal, shown_value, title
from benchmarks.summary import Measured
from rlhf_ray.observability.report_charts import Chart

OVERVIEW, REPEATS = "Beside the goals", "Repeat by repeat"
TICKS = [0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100]
GOAL_LINE = {"color": "var(--soft)", "width": 1.5, "dash": "dot"}


def charts_of(measured: dict[str, Measured]) -> list[Chart]:
    """An overview, and a chart a figure."""
    figures = {name: m.figure for name, m in measured.items()}
    return [overview(figures), *(repeats_chart(name, figure) for name, figure in figures.items())] if figures else []


def lead(figure: Figure, value: float) -> float:
    """How many times better than the goal a value is: 1 at the goal, more beyond it, whichever way is good.

    A value that is not positive has no ratio; it stands a hundredfold away on its side.
    """
    if value <= 0 or figure.goal <= 0:
        return 100.0 if (value >= figure.goal) == (figure.better == "higher") else 0.01
    return value / figure.goal if figure.better == "higher" else figure.goal / value


def overview(figures: dict[str, Figure]) -> Chart:
    """A line a figure from its worst to its best repeat, a dot at the median, and the goal at 1."""
    data = [bar(name, figure) for name, figure in reversed(figures.items())]
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": GOAL_LINE, "layer": "below"}
    return Chart(
        title="How far beyond its goal each figure is",
        healthy="The dot is the median over the repeats, the line reaches from the worst repeat to the best. Right of "
        "the dotted line the goal is reached, whether more or less is good.",
        section=OVERVIEW, latest="", data=data,
        layout=go.Layout(
            xaxis={"title_text": "Times better than the goal (logarithmic)", "type": "log", "tickvals": TICKS,
                   "ticktext": [f"{tick:g}" for tick in TICKS]},
            yaxis={"title_text": "", "type": "category"}, showlegend=False, hovermode="closest", shapes=[line]),
    )


def bar(name: str, figure: Figure) -> go.Scatter:
    """One figure of the overview."""
    ends = sorted((lead(figure, min(figure.repeats)), lead(figure, max(figure.repeats))))
    colour = "var(--good)" if figure.reached else "var(--bad)"
    said = (f"{shown_value(figure)}, goal {shown_goal(figure)}"
            f"<br>{shown_value(figure, min(figure.repeats))} to {shown_value(figure, max(figure.repeats))}")
    return go.Scatter(
        mode="lines+markers", x=[ends[0], lead(figure, figure.value), ends[1]], y=[title(name)] * 3, name=title(name),
        line={"color": colour, "width": 3}, marker={"color": colour, "size": [0, 12, 0], "opacity": 1},
        hovertemplate=f"{said}<extra></extra>")


def repeats_chart(name: str, figure: Figure) -> Chart:
    """What each repeat gave, with the goal and the median."""
    count = len(figure.repeats)
    numbers = list(range(1, count + 1))
    ends = [0.5, count + 0.5]
    data = [
        go.Scatter(mode="markers", x=numbers, y=figure.repeats, name="repeats",
                   marker={"color": "var(--generator)", "size": 8}),
        go.Scatter(mode="lines", x=ends, y=[figure.value] * 2, name="median",
                   line={"color": "var(--good)" if figure.reached else "var(--bad)", "width": 2}),
        go.Scatter(mode="lines", x=ends, y=[figure.goal] * 2, name="goal", line=GOAL_LINE),
    ]
    return Chart(
        title=title(name), healthy=sides(figure), section=REPEATS, latest=shown_value(figure), data=data,
        layout=go.Layout(
            xaxis={"title_text": "Repeat", "range": ends, "dtick": max(1, count // 10)},
            yaxis={"title_text": "Ratio" if is_ratio(figure) else figure.unit or "Value", "rangemode": "tozero"},
            showlegend=True),
    )


def sides(figure: Figure) -> str:
    """What was measured beside what."""
    said = [(figure.ours, figure.ours_is), (figure.theirs, figure.theirs_is)]
    parts = [f"{what} ({shown(value, figure.unit)})" if value is not None else what for value, what in said if what]
    return " beside ".join(parts) + "."
