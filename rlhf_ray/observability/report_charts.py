"""The report's charts: which metrics belong together, what healthy looks like, and plotly's graph objects of them.

Colours are variables of report.css, "var(--policy)", or "var(--policy/35)" with 35 % opacity: the page looks them up in
the reader's light or dark palette (assets/report.js).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from rlhf_ray.observability.bottleneck import BUSY, COORDINATOR, mean_shares
from rlhf_ray.observability.chart_specs import CHARTS, PHASE_COLOURS, ROLE_COLOURS, ChartPlan, reward_components
from rlhf_ray.observability.metric_catalogue import NONE_IF_ABSENT, describe, readable

Rows = Sequence[dict[str, Any]]

MAX_POINTS = 600
"""Points of one line; longer runs are plotted as means of neighbouring steps."""
MAX_BARS = 48
SMOOTH_FROM = 40
"""Lines with at least this many points also get a running mean."""
STEP_AXIS = "Step (updates)"


@dataclass(frozen=True)
class Chart:
    """One chart, ready for plotly.js."""

    title: str
    healthy: str
    """A sentence about what a healthy run looks like in this chart."""
    section: str
    latest: str
    """The newest value, shown in the card's corner; empty for charts with several lines."""
    data: Sequence[go.Scatter | go.Bar | go.Histogram]
    layout: go.Layout


def charts_of(rows: Rows) -> list[Chart]:
    """The charts that these rows have numbers for, in the report's order."""
    made = [chart for plan in CHARTS for chart in (_line_chart(plan, rows), *_beside(plan, rows))]
    return [c for c in (*made, *_held_out_charts(rows), _time_chart(rows), _waiting_chart(rows)) if c is not None]


def _beside(plan: ChartPlan, rows: Rows) -> list[Chart | None]:
    """Charts that follow a planned chart: the components after the reward, where there are several."""
    if plan.metrics != ("reward/mean",):
        return []
    names = list(dict.fromkeys(
        name.removeprefix("reward/failures/") for row in rows for name in row if name.startswith("reward/failures/")))
    components = reward_components(names)
    failing = any(value for name in names for value in series(rows, f"reward/failures/{name}")[1])
    return [_line_chart(p, rows) for p in (*components[: len(names) > 1], *components[1 : 1 + failing])]


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, rows without a finite value left out."""
    found = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    return [step for step, _ in found], [value for _, value in found]


def thin(values: Sequence[float], limit: int) -> list[float]:
    """Means over equal runs of neighbours so that at most `limit` values remain."""
    size = math.ceil(len(values) / limit)
    groups = [values[i : i + size] for i in range(0, len(values), size)] if size > 1 else [[v] for v in values]
    return [_rounded(sum(g) / len(g)) for g in groups]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value with up to `reach` neighbours on either side: smooth, and not late as a moving average is."""
    sums = list(itertools.accumulate(values, initial=0.0))
    windows = ((max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values)))
    return [_rounded((sums[end] - sums[start]) / (end - start)) for start, end in windows]


def _line_chart(plan: ChartPlan, rows: Rows) -> Chart | None:
    lines = {name: series(_with_zeros(rows, name), name) for name in plan.metrics}
    lines = {name: line for name, line in lines.items() if any(line[1]) or (line[0] and not may_lack(name))}
    if not lines or (plan.only_if_changing and all(len(set(values)) < 2 for _, values in lines.values())):
        return None
    data: list[go.Scatter] = []
    for name, (steps, values) in lines.items():
        place = plan.metrics.index(name)
        title = plan.names[place] if plan.names else describe(name).title
        data += lines_of(title, steps, values, plan.colours[place], plan.smooth)
    return Chart(
        title=plan.title,
        healthy=plan.healthy,
        section=plan.section,
        latest=_latest(plan, lines),
        data=data,
        layout=layout_of(plan.axis, legend=len(lines) > 1, ticks=plan.ticks),
    )


def may_lack(name: str) -> bool:
    """Whether rows lack this metric of episodes where it is 0."""
    return name.startswith("episodes/") and name.startswith(NONE_IF_ABSENT)


def _with_zeros(rows: Rows, name: str) -> Rows:
    """The rows, with the zeros that are left out of those with episodes."""
    return [{name: 0.0, **row} for row in rows if "episodes/turns" in row] if may_lack(name) else rows


def _latest(plan: ChartPlan, lines: dict[str, Any]) -> str:
    if len(lines) > 1:
        return ""
    newest = next(iter(lines.values()))[1][-1]
    return f"{newest:.1%}" if plan.ticks.endswith("%") else f"{newest:.3g}" if abs(newest) < 1000 else f"{newest:,.0f}"


def lines_of(title: str, steps: list[int], values: list[float], colour: str, smooth: bool) -> list[go.Scatter]:
    """A line; for long series a faint line of the steps under a strong line of their running mean."""
    x = thin(steps, MAX_POINTS)
    y = thin(values, MAX_POINTS)
    mode = "lines" if len(x) > 12 else "lines+markers"
    if len(x) < SMOOTH_FROM or not smooth:
        return [go.Scatter(mode=mode, x=x, y=y, name=title, marker_size=6,
                           line={"color": f"var(--{colour})", "width": 2})]
    return [go.Scatter(mode=mode, x=x, y=y, name=f"{title}, each step", showlegend=False,
                       line={"color": f"var(--{colour}/35)", "width": 1}),
            go.Scatter(mode=mode, x=x, y=running_mean(y, len(y) // 20), name=title,
                       line={"color": f"var(--{colour})", "width": 2.5})]


def _held_out_charts(rows: Rows) -> list[Chart]:
    """Charts of held-out metrics without a plan, from three evaluations on. Two points are a change, not a curve; the
    table of before and after shows them."""
    planned = {name for plan in CHARTS for name in plan.metrics}
    measured = {name for row in rows for name in row if name.startswith("eval/")} - planned
    names = sorted(name for name in measured if len(series(rows, name)[0]) > 2)
    plans = (
        ChartPlan(
            f"Held out: {readable(name.removeprefix('eval/')).lower()}", (name,), "Learning", colours=("generator",),
            axis=readable(name.removeprefix("eval/")) + " (mean)",
            healthy="Measured on prompts never trained on, with the same seeds every time, so only the policy changes.",
        )
        for name in names
    )
    return [chart for plan in plans if (chart := _line_chart(plan, rows)) is not None]


def _time_chart(rows: Rows) -> Chart | None:
    """Stacked bars of the seconds each kind of work took, with the whole step as a line."""
    timed = [row for row in rows if any(isinstance(row.get(f"time/{phase}"), (int, float)) for phase in PHASE_COLOURS)]
    if not timed:
        return None
    x = thin([row["step"] for row in timed], MAX_BARS)

    def seconds(phase: str) -> list[float]:
        return thin([row.get(f"time/{phase}") or 0.0 for row in timed], MAX_BARS)

    data = [go.Bar(x=x, y=y, name=describe(f"time/{phase}").title, marker_color=f"var(--{colour})")
            for phase, colour in PHASE_COLOURS.items() if any(y := seconds(phase))]
    if any(whole := seconds("step")):
        data.append(go.Scatter(mode="lines", x=x, y=whole, name="Whole step",
                               line={"color": "var(--ink)", "width": 1.5, "dash": "dot"}))
    return Chart(
        title="Where each step's time went",
        healthy="Generation usually takes the largest part. Bars that reach above the dotted line mean that roles "
        "worked side by side; bars that stay below it are time in which everybody waited.",
        section="System",
        latest="",
        data=data,
        layout=layout_of("Work in a step (seconds)", legend=True).update(barmode="stack", bargap=0.15),
    )


def _waiting_chart(rows: Rows) -> Chart | None:
    """A bar per role: its time, by what it did and which role it waited for."""
    shares = mean_shares(rows)
    if not shares:
        return None
    roles = sorted(shares, key=lambda role: -shares[role].get(BUSY, 0.0))
    causes = [BUSY, *(role for role in roles if any(shares[other].get(role) for other in roles)), COORDINATOR]
    data = [
        go.Bar(x=[readable(role) for role in roles], y=[_rounded(shares[role].get(cause, 0.0)) for role in roles],
               name=_did(cause),
               marker_color="var(--ink)" if cause == BUSY else f"var(--{ROLE_COLOURS.get(cause, 'line')}/55)")
        for cause in causes if any(shares[role].get(cause) for role in roles)
    ]
    return Chart(
        title="What each role did, and whom it waited for",
        healthy="The role that limits the run is busy nearly all the time. Roles that wait for each other in turn "
        "would work side by side with coordinator.max_staleness of 1.",
        section="System",
        latest="",
        data=data,
        layout=go.Layout(
            xaxis_title_text="Role", showlegend=True, barmode="stack", bargap=0.35,
            yaxis={"title_text": "Share of the role's time", "tickformat": ".0%", "range": [0, 1]}),
    )


def _did(cause: str) -> str:
    if cause == BUSY:
        return "Busy"
    return "Handing over" if cause == COORDINATOR else f"Waits for {readable(cause).lower()}"


def layout_of(y_title: str, legend: bool, ticks: str = "") -> go.Layout:
    """The layout of a chart over steps; `ticks` as in `ChartPlan`."""
    return go.Layout(xaxis_title_text=STEP_AXIS, yaxis_title_text=y_title, showlegend=legend,
                     **({"yaxis_tickformat": ticks, "yaxis_rangemode": "tozero"} if ticks else {}))


def _rounded(value: float) -> float:
    """Six significant digits: enough to plot, a third of the page's size."""
    return float(f"{value:.6g}")
