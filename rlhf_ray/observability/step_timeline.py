"""Who worked when in one step, as a trace that Perfetto and chrome://tracing open, and as a picture for the report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rlhf_ray.observability.catalogue import readable
from rlhf_ray.observability.report_plan import ROLE_COLOURS

Lane = Sequence[Any]
"""Worker ("generator/0"), begin and end of a call in seconds from the step's begin."""

LEFT, WIDTH, ROW = 150, 760, 22
"""Of the picture: room for names, and for the time; height of a worker's row."""


def chrome_trace(lanes: Sequence[Lane]) -> dict[str, Any]:
    """The lanes in the Trace Event Format of Chromium's tracing tool: a process a role, a thread a worker, times in
    microseconds."""
    workers = sorted({lane[0] for lane in lanes})
    roles = sorted({worker.split("/")[0] for worker in workers})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": role}}
        for number, role in enumerate(roles)]
    for worker, start, end in lanes:
        role, rank = worker.split("/")
        events.append({"ph": "X", "name": worker, "cat": "call", "pid": roles.index(role), "tid": int(rank),
                       "ts": start * 1e6, "dur": (end - start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def picture(lanes: Sequence[Lane], seconds: float) -> str:
    """The lanes as an SVG that stands alone: a row a worker, a bar a call; empty without lanes."""
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
    """The workers: roles as they begin to work, ranks of a role together."""
    roles = list(dict.fromkeys(lane[0].split("/")[0] for lane in lanes))
    return sorted({lane[0] for lane in lanes},
                  key=lambda worker: (roles.index(worker.split("/")[0]), int(worker.split("/")[1])))


def _bar(row: int, role: str, start: float, end: float, seconds: float) -> str:
    x, width = LEFT + WIDTH * start / seconds, max(1.0, WIDTH * (end - start) / seconds)
    colour = ROLE_COLOURS.get(role, "assembler")
    return (f'<rect x="{x:.1f}" y="{row * ROW + 3}" width="{width:.1f}" height="{ROW - 6}" rx="2" '
            f'style="fill:var(--{colour})"><title>{start:.3f}–{end:.3f} s</title></rect>')
