"""The report's part on profiles: when each worker worked in a profiled step, what it computed, and its traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhf_ray.errors import DataError
from rlhf_ray.observability.chart_specs import ROLE_COLOURS
from rlhf_ray.observability.metric_catalogue import readable
from rlhf_ray.observability.report_page import folded
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import Lane

SHOWN = 8
"""Operators of each worker in the report; profile.json has more."""


def profiles(run: RunDirectory) -> str:
    """All profiles of a run as HTML, newest step first and open; empty where none was made.

    Raises:
        DataError: a profile is damaged.
    """
    found = sorted(run.profile.glob("step_*/profile.json"), key=lambda path: -int(path.parent.name.split("_")[1]))
    if not found:
        return ""
    parts = []
    for path in found:
        try:
            parts.append(_profile(json.loads(path.read_text()), f"profile/{path.parent.name}"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error!r}. Remove its directory, then make the report again"
                            ) from error
    about = ('<p class="aside">Open a trace in <code>ui.perfetto.dev</code> or <code>chrome://tracing</code>. '
             "Milliseconds are an operator's own, without what it called; a profiled step is slower than others.</p>")
    return f'<h2>Profile</h2>{about}{parts[0]}' + "".join(
        folded(f"Step {path.parent.name.split('_')[1]}", part) for path, part in zip(found[1:], parts[1:], strict=True))


def _profile(profile: Mapping[str, Any], where: str) -> str:
    drawn = picture(profile["spans"], profile["seconds"])
    workers = "".join(_worker(name, worker, where) for name, worker in sorted(profile["workers"].items()))
    return (f'<div class="profile card scroll"><h3>Step {int(profile["step"])}: {profile["seconds"]:.3g} s, '
            f'<a href="{escape(where)}/workers.trace.json">who worked when</a></h3>{drawn}</div>'
            f'<div class="sides">{workers}</div>')


def _worker(name: str, worker: Mapping[str, Any], where: str) -> str:
    trace = escape(f"{where}/{worker['trace']}")
    most = max((operator["own_ms"] for operator in worker["operators"]), default=0.0)
    lines = "".join(
        f'<tr><td>{escape(operator["name"])}</td><td class="num">{operator["calls"]:,}</td>'
        f'<td class="num">{operator["own_ms"]:,.1f}</td>'
        f'<td><meter max="{most:.3f}" value="{operator["own_ms"]:.3f}"></meter></td></tr>'
        for operator in worker["operators"][:SHOWN])
    head = '<tr><th>Operator</th><th class="num">Calls</th><th class="num">ms</th><th></th></tr>'
    table = (f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>" if lines else
             "<p>Nothing was computed on it.</p>")
    return (f'<div class="profile card scroll"><h3>{escape(name)}: <a href="{trace}">trace</a> of '
            f'{worker["seconds"]:.3g} s</h3>{table}</div>')



LEFT, WIDTH, ROW = 150, 760, 22
"""Of the picture, in pixels: width for names, width for the time, height of a worker's row."""


def picture(lanes: Sequence[Lane], seconds: float) -> str:
    """The lanes as a self-contained SVG: a row per worker, a bar per call; empty without lanes."""
    workers = _in_order(lanes)
    if not workers or seconds <= 0:
        return ""
    height = ROW * len(workers) + 26
    parts = [f'<svg class="timeline" viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img" '
             'aria-label="Who worked when in the step">']
    for tick in range(5):
        x = LEFT + WIDTH * tick / 4
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - 22}"/>'
                     f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{seconds * tick / 4:.3g} s</text>')
    for row, worker in enumerate(workers):
        role, rank = worker.split("/")
        parts.append(f'<text x="{LEFT - 8}" y="{row * ROW + 15}" text-anchor="end">'
                     f"{escape(readable(role))} {escape(rank)}</text>")
        parts += [_bar(row, role, start, end, seconds) for name, start, end in lanes if name == worker]
    return "".join(parts) + "</svg>"


def _in_order(lanes: Sequence[Lane]) -> list[str]:
    """The workers: roles in the order in which they begin to work, ranks of a role together."""
    roles = list(dict.fromkeys(lane[0].split("/")[0] for lane in lanes))
    return sorted({lane[0] for lane in lanes},
                  key=lambda worker: (roles.index(worker.split("/")[0]), int(worker.split("/")[1])))


def _bar(row: int, role: str, start: float, end: float, seconds: float) -> str:
    x, width = LEFT + WIDTH * start / seconds, max(1.0, WIDTH * (end - start) / seconds)
    colour = ROLE_COLOURS.get(role, "assembler")
    return (f'<rect x="{x:.1f}" y="{row * ROW + 3}" width="{width:.1f}" height="{ROW - 6}" rx="2" '
            f'style="fill:var(--{colour})"><title>{start:.3f}–{end:.3f} s</title></rect>')
