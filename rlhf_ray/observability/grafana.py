"""The Grafana dashboard of runs, made from the catalogue and the report's plan of charts:

    python -m rlhf_ray.observability.grafana launch/monitoring/grafana/dashboards/rlhf_ray.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_ray.observability.chart_specs import CHARTS, ChartPlan
from rlhf_ray.observability.metric_catalogue import describe
from rlhf_ray.observability.prometheus import LIVE, series_of

UNITS = {"seconds": "s", "MiB": "mbytes", "bytes": "bytes", "share": "percentunit", "share of time": "percentunit",
         "share of prompts": "percentunit"}
"""Grafana's names of our units; for others the axis is labelled."""
SOURCE = {"type": "prometheus", "uid": "${source}"}
RUN = 'run=~"$run"'
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
"""Of Grafana's grid."""


class Query(NamedTuple):
    """A PromQL expression and what its lines are called."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A chart, or a number when `kind` is "stat"."""

    title: str
    queries: tuple[Query, ...]
    unit: str = ""
    about: str = ""
    kind: str = "timeseries"
    stacked: bool = False
    axis: str = ""


def of_metric(name: str, legend: str = "{{run}}") -> Query:
    """A metric of rows, or a live one, of the chosen runs."""
    series = series_of(name)
    labels = ",".join([RUN, *(f'{label}="{value}"' for label, value in series.labels.items())])
    return Query(f"ray_{series.name}{{{labels}}}", legend)


def from_plan(plan: ChartPlan) -> Panel:
    """A chart of the report."""
    names = plan.names or tuple(describe(metric).title for metric in plan.metrics)
    legends = [f"{{{{run}}}} {name}" if len(plan.metrics) > 1 else "{{run}}" for name in names]
    queries = tuple(of_metric(metric, legend) for metric, legend in zip(plan.metrics, legends, strict=True))
    unit = "percentunit" if plan.ticks == ".0%" else UNITS.get(describe(plan.metrics[0]).unit, "")
    return Panel(plan.title, queries, unit, plan.healthy, axis=plan.axis)


def live(name: str, title: str, legend: str, unit: str = "", stacked: bool = False, about: str = "") -> Panel:
    """One of the live metrics."""
    found = LIVE[name].help
    return Panel(title, (of_metric(name, legend),), unit or UNITS.get(found.unit, ""), about or f"{found.title}.",
                 stacked=stacked, axis="" if unit or found.unit in UNITS else found.unit)


def rows() -> dict[str, list[Panel]]:
    """The dashboard's rows by name, in order."""
    section = {name: [from_plan(plan) for plan in CHARTS if plan.section == name]
               for name in ("Learning", "Optimisation")}
    system = {plan.title: from_plan(plan) for plan in CHARTS if plan.section == "System"}
    return {
        "Run": _progress(),
        "Learning": [*section["Learning"], _held_out()],
        "Optimisation": section["Optimisation"],
        "Throughput": [system["Samples trained on"], system["Tokens trained on"], _phases()],
        "Roles": _roles(),
        "Weights": [system["Weight publication"], system["Generator against learner"], _sent(),
                    live("live/versions_behind", "Versions behind the policy", "{{run}} {{worker}}", about=(
                        "0, and 1 while new weights are published. A generator that stays behind makes nothing."))],
        "Buffer": [live("live/buffer", "Replay buffer", "{{run}} {{state}}", stacked=True),
                   live("live/buffer_mb", "Experience in the object store", "{{run}}"), system["Staleness"]],
        "Faults": _faults(),
    }


def _progress() -> list[Panel]:
    def stat(title: str, expression: str, unit: str = "short") -> Panel:
        return Panel(title, (Query(expression, "{{run}}"),), unit, kind="stat")

    step, steps = (of_metric(name).expression for name in ("live/step", "live/steps"))
    pace = of_metric("time/step").expression
    return [
        stat("Step", step), stat("Of", steps), stat("Time left", f"({steps} - {step}) * {pace}", "s"),
        stat("Since the last step", of_metric("live/step_age").expression, "s"),
        stat("Reward", of_metric("reward/mean").expression), stat("KL (nats)", of_metric("kl/sequence").expression),
    ]


def _held_out() -> Panel:
    queries = of_metric("eval/reward", "{{run}} reward"), of_metric("eval/gold", "{{run}} judge")
    return Panel("Held-out score", queries, about="The same held-out prompts with the same seeds each time.",
                 axis="Mean score")


def _phases() -> Panel:
    return Panel("Time of each kind of work", (Query(f"ray_rlhf_time{{{RUN}}}", "{{run}} {{phase}}"),
                                               of_metric("time/step", "{{run}} whole step")), "s",
                 "Kinds of work overlap; the longest one says what to make faster.")


def _roles() -> list[Panel]:
    return [
        live("live/pool_busy", "Pools at work", "{{run}} {{pool}}", "percentunit",
             about="Workers that had work, mean of a minute. A pool near 0 waits for another: see the shares."),
        live("live/workers", "Workers", "{{run}} {{role}} {{state}}", stacked=True),
        Panel("Where roles' time goes", (Query(f"ray_rlhf_share{{{RUN}}}", "{{run}} {{role}}: {{cause}}"),),
              "percentunit", "Busy, or waiting for which other role. Shares of a role sum to 1."),
        live("live/oldest_call", "Oldest call that is not answered", "{{run}} {{role}}"),
    ]


def _sent() -> Panel:
    return Panel("Weights sent", (of_metric("weights/published_mb"),), "mbytes",
                 "By the learner in one publication, once a node. Falls when what does not change is left out.")


def _faults() -> list[Panel]:
    return [
        live("live/lost_workers", "Workers lost so far", "{{run}}"),
        Panel("Time workers were missing", (of_metric("faults/seconds_down"),), "s",
              "Worker seconds in the step, of those that came back."),
        Panel("Work made again", (of_metric("faults/redispatched"),), "",
              "Samples and calls that other workers made again.", axis="in the step"),
        live("live/quarantined", "Samples left out", "{{run}}"),
    ]


def dashboard() -> dict[str, Any]:
    """The whole dashboard, for Grafana 10 and later."""
    return {
        "uid": "rlhf-ray", "title": "rlhf_ray", "tags": ["rlhf_ray", "ray"], "schemaVersion": 39, "editable": True,
        "graphTooltip": 1, "refresh": "15s", "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "templating": {"list": _variables()}, "annotations": {"list": []}, "links": [],
        "panels": list(_panels(rows())),
    }


def _variables() -> list[dict[str, Any]]:
    runs = "label_values(ray_rlhf_live_step, run)"
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1},
        {"name": "run", "label": "Run", "type": "query", "datasource": SOURCE,
         "query": {"query": runs, "refId": "run"}, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".+",
         "current": {"text": "All", "value": "$__all"}, "sort": 1},
    ]


def _panels(named: dict[str, list[Panel]]) -> Iterator[dict[str, Any]]:
    """Rows and panels with their places in the grid."""
    number, top = 1, 0
    for name, panels in named.items():
        yield {"id": number, "type": "row", "title": name, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}}
        number, top = number + 1, top + 1
        places, height = _places(panels)
        for panel, (x, y, width) in zip(panels, places, strict=True):
            yield _panel(panel, number, {"x": x, "y": top + y, "w": width, "h": height})
            number += 1
        top += max(y for _, y, _ in places) + height


def _places(panels: Sequence[Panel]) -> tuple[list[tuple[int, int, int]], int]:
    """Column, line and width of each panel of a row, and the height of all."""
    width, height = (COLUMNS // len(panels), 4) if panels[0].kind == "stat" else (PANEL_WIDTH, PANEL_HEIGHT)
    a_line = COLUMNS // width
    return [(i % a_line * width, i // a_line * height, width) for i in range(len(panels))], height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 2, "fillOpacity": 25 if panel.stacked else 0, "showPoints": "auto",
                              "spanNulls": True, "axisLabel": panel.axis}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    chart = panel.kind == "timeseries"
    options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    number_options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "textMode": "auto"}
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.about, "datasource": SOURCE,
        "gridPos": place, "options": options if chart else number_options,
        "fieldConfig": {"defaults": {"unit": panel.unit or "short", "custom": custom if chart else {}},
                        "overrides": []},
        "targets": [{"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query.expression,
                     "legendFormat": query.legend} for i, query in enumerate(panel.queries)],
    }


def main(path: str) -> None:
    """Write the dashboard to a file."""
    Path(path).write_text(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
