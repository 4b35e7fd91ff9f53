"""One self-contained HTML page about several runs: their curves in common charts, and the settings that differ."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from rlhf_ray.errors import ConfigError, DataError
from rlhf_ray.files.writing import write_atomically
from rlhf_ray.observability.chart_specs import CHARTS, COMPONENT_COLOURS, ChartPlan
from rlhf_ray.observability.html_page import ASSETS, page
from rlhf_ray.observability.metric_catalogue import describe, readable
from rlhf_ray.observability.metrics import metric_rows
from rlhf_ray.observability.report import kind_of_run, lead_of_run, saved_values
from rlhf_ray.observability.report_charts import Chart, Rows, layout_of, lines_of, series
from rlhf_ray.observability.row_means import thinned
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.observability.tables import number

ENDS = ("reward/mean", "reward/gold", "kl/sequence", "response/length", "eval/reward", "eval/loss", "eval/accuracy",
        "sft/loss", "reward_model/accuracy", "process_reward/accuracy", "throughput/samples_per_second")
"""Metrics of the table of runs: the newest value, and the first."""
DASHES = ("solid", "dash", "dot")
"""Styles of lines, for more runs than there are colours."""
UNCOMPARED = ("run.dir", "run.upload")


class Member(NamedTuple):
    """A run on the page."""

    name: str
    rows: Rows
    config: Mapping[str, Any]
    summary: Mapping[str, Any]


def write_runs_page(paths: Sequence[Path], output: Path) -> Path:
    """Write the page; the runs' own files are only read.

    Raises:
        DataError: a directory has no metrics, or damaged ones.
        ConfigError: a run is named twice, or the page cannot be written.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"a run is named twice among {', '.join(map(str, paths))}; name each once")
    runs = [_member(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    charts = sorted(_charts(runs), key=lambda c: ("Learning", "Optimisation", "System").index(c.section))
    names = [run.name for run in runs]
    shown = [name for name in ENDS if any(series(run.rows, name)[1] for run in runs)]
    text = page(ASSETS / "runs.html", charts, kind="Runs", title=" · ".join(names), facts={},
                lead=f"{len(runs)} runs in common charts: a line for each.",
                runs=(["Run", "Trains by", "Length", *map(readable, shown)], [_line(run, shown) for run in runs]),
                settings=(["Setting", *names], list(_differences(runs))))
    try:
        write_atomically(output, text.encode())
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror or error}; name a file in a writable "
                          "folder") from error
    return output


def _member(path: Path, name: str) -> Member:
    run = RunDirectory(path)
    rows = thinned(metric_rows(path))
    if not rows:
        raise DataError(f"{path} has no {run.metrics.name}: no step has been finished there, or it is no run")
    return Member(name, rows, saved_values(run), read_json(run.summary))


def _names(paths: Sequence[Path]) -> list[str]:
    """What tells the runs apart: the last part of each path, or all that they do not have in common."""
    last = [path.resolve().name for path in paths]
    if len(set(last)) == len(last):
        return last
    common = os.path.commonpath([path.resolve() for path in paths])
    return [str(path.resolve().relative_to(common)) for path in paths]


def _line(run: Member, shown: Sequence[str]) -> list[str]:
    """The run's line in the table of runs."""
    ends = [series(run.rows, name)[1] for name in shown]
    cells = ["–" if not values else number(values[-1]) + (f" (from {number(values[0])})" if len(values) > 1 else "")
             for values in ends]
    return [run.name, kind_of_run(run.rows, run.config), lead_of_run(run.rows, run.summary), *cells]


def _charts(runs: Sequence[Member]) -> Iterator[Chart]:
    """A chart for each planned metric, and each held-out one, of which a run has numbers."""
    for plan in CHARTS:
        for place, name in enumerate(plan.metrics):
            title = plan.names[place] if plan.names else describe(name).title
            yield from _chart(runs, plan, name, plan.title if len(plan.metrics) == 1 else f"{plan.title}: {title}")
    planned = {name for plan in CHARTS for name in plan.metrics}
    held_out = {name for run in runs for row in run.rows for name in row if name.startswith("eval/")} - planned
    for name in sorted(held_out):
        words = readable(name.removeprefix("eval/"))
        yield from _chart(runs, ChartPlan(f"Held out: {words.lower()}", (name,), "Learning", axis=words, healthy=(
            "Measured on prompts never trained on. Runs with other held-out prompts are not comparable.")), name,
            f"Held out: {words.lower()}")


def _chart(runs: Sequence[Member], plan: ChartPlan, name: str, title: str) -> Iterator[Chart]:
    lines = {run.name: series(run.rows, name) for run in runs}
    lines = {run: line for run, line in lines.items() if line[0]}
    if not lines or (plan.only_if_changing and len({value for _, values in lines.values() for value in values}) < 2):
        return
    data: list[go.Scatter] = []
    for place, run in enumerate(runs):
        if run.name in lines:
            colour, dash = place % len(COMPONENT_COLOURS), place // len(COMPONENT_COLOURS) % len(DASHES)
            traces = lines_of(run.name, *lines[run.name], COMPONENT_COLOURS[colour], plan.smooth)
            data += [trace.update(line_dash=DASHES[dash]) for trace in traces]
    yield Chart(title=title, healthy=plan.healthy, section=plan.section, latest="", data=data,
                layout=layout_of(plan.axis, legend=True, ticks=plan.ticks))


def _differences(runs: Sequence[Member]) -> Iterator[list[str]]:
    """Fields of the configurations that are not the same in all runs, with each run's value."""
    flat = [dict(_flat(run.config)) for run in runs]
    for field in dict.fromkeys(field for values in flat for field in values):
        found = [values.get(field, "–") for values in flat]
        if field not in UNCOMPARED and any(value != found[0] for value in found):
            yield [field, *map(str, found)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "" if value is None else value
