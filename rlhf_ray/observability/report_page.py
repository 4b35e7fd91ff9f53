"""The report as HTML: sections from plain values, every text escaped, everything the page needs inside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from rlhf_ray.observability.metric_catalogue import readable
from rlhf_ray.observability.report_charts import Chart
from rlhf_ray.observability.tables import Change, number

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the browser itself refuses anything from outside the page."""

WIDE_TRACES = 6
"""Charts with more traces than this take a whole row of the page."""


class Tile(NamedTuple):
    """One number at the top of the page."""

    label: str
    value: str
    was: str = ""


def page(title: str, body: Iterable[str], charts: Sequence[Chart], extra: str = "") -> str:
    """The whole document. `extra` names an additional style and script among the assets."""
    assets = files("rlhf_ray.observability") / "assets"
    more_style = (assets / f"{extra}.css").read_text() if extra else ""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{(assets / 'report.css').read_text()}{more_style}</style>"
    )
    scripts = ""
    if charts:
        from plotly.offline import get_plotlyjs

        scripts = (
            '<noscript><p class="note">The plots are drawn by JavaScript, which is off here.</p></noscript>\n'
            f"<script>{get_plotlyjs()}</script>\n"
            f'<script type="application/json" id="figures">{figures_json(charts)}</script>\n'
            f"<script>{(assets / 'report.js').read_text()}</script>\n"
        )
    if extra:
        scripts += f"<script>{(assets / f'{extra}.js').read_text()}</script>\n"
    inside = "\n".join(part for part in body if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n<main>\n{inside}\n</main>\n'
        f"{scripts}</body></html>\n"
    )


def figures_json(charts: Iterable[Chart]) -> str:
    """Figures as JSON that cannot end its script element."""
    text = json.dumps([{"data": c.data, "layout": c.layout} for c in charts], separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def header(kind: str, title: str, lead: str, facts: Mapping[str, str], notes: Iterable[str]) -> str:
    """Title, description and facts of the run."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return (
        f'<header><div class="eyebrow">{escape(kind)}</div><h1>{escape(title)}</h1>'
        f'<p class="lead">{escape(lead)}</p>'
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        + (f'<dl class="facts">{rows}</dl>' if rows else "")
        + "</header>"
    )


def tiles(items: Iterable[Tile]) -> str:
    """The most important numbers, side by side."""
    cells = "".join(
        f'<div class="tile card"><div class="label">{escape(t.label)}</div><div class="value">{escape(t.value)}</div>'
        f'<div class="was">{escape(t.was)}</div></div>'
        for t in items
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def verdict(rows: Sequence[Change]) -> str:
    """A table of before and after the run, with the change coloured and in words."""
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td>{escape(readable(row.metric))}</td>"
        f'<td class="num">{number(row.before)}</td><td class="num">{number(row.after)}</td>'
        f'<td class="num">{_pill(row)}</td></tr>'
        for row in rows
    )
    headings = '<th>Metric</th><th class="num">Before</th><th class="num">After</th><th class="num">Change</th>'
    return (
        "<h2>Before and after</h2>"
        '<p class="aside">The same held-out prompts with the same seeds, before the first step and after the last.</p>'
        f'<div class="verdict card scroll"><table><thead><tr>{headings}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def texts(items: Iterable[Mapping[str, Any]]) -> str:
    """Responses to the same prompts before and after, side by side."""
    cards = "".join(
        f'<div class="text card"><div class="prompt words"><b>Prompt</b>{_words(item, "prompt")}</div>'
        f'<div class="sides"><div class="side words"><b>Before</b>{_words(item, "before")}</div>'
        f'<div class="side after words"><b>After</b>{_words(item, "after")}</div></div></div>'
        for item in items
    )
    return f"<h2>What it writes</h2>{cards}" if cards else ""


def curves(charts: Sequence[Chart]) -> str:
    """Cards with the plots, section by section; `plot-<i>` is drawn by report.js."""
    result, section = [], ""
    for i, chart in enumerate(charts):
        if chart.section != section:
            result.append(("</div>" if section else "") + f'<h2>{escape(chart.section)}</h2><div class="charts">')
            section = chart.section
        wide = " wide" if len(chart.data) > WIDE_TRACES else ""
        result.append(
            f'<figure class="chart card{wide}"><figcaption><div class="head"><h3>{escape(chart.title)}</h3>'
            f'<span class="now">{escape(chart.latest)}</span></div><p>{escape(chart.healthy)}</p></figcaption>'
            f'<div class="plot" id="plot-{i}"></div></figure>'
        )
    return "".join(result) + ("</div>" if result else "")


def rollouts(rows: Sequence[Mapping[str, Any]]) -> str:
    """A few training rollouts, collapsed."""
    if not rows:
        return ""
    gold = any(row.get("gold") is not None for row in rows)
    headings = "".join(f'<th class="num">{h}</th>' for h in ("Score", "KL", *(("Judge",) if gold else ())))
    lines = "".join(
        f'<tr><td class="num">{row["step"]}</td><td class="words">{_words(row, "prompt")}</td>'
        f'<td class="words">{_words(row, "response")}</td>'
        + "".join(f'<td class="num">{number(row.get(k))}</td>' for k in ("score", "kl", *(("gold",) if gold else ())))
        + "</tr>"
        for row in rows
    )
    table = f'<table><thead><tr><th class="num">Step</th><th>Prompt</th><th>Response</th>{headings}</tr></thead>'
    return folded("Rollouts along the way", f'<div class="scroll">{table}<tbody>{lines}</tbody></table></div>')


def folded(title: str, inside: str) -> str:
    """A part that a click opens. `inside` is HTML."""
    return f'<details class="card"><summary>{escape(title)}</summary>{inside}</details>'


def folded_text(title: str, text: str) -> str:
    """Preformatted text that a click opens; empty for no text."""
    return folded(title, f"<pre>{escape(text)}</pre>") if text else ""


def footer(about: str = "Thin lines are single steps, thick lines their running mean.") -> str:
    """The page's last line."""
    return f"<footer>{escape(about)} Made by rlhf-ray; this page loads nothing from the network.</footer>"


def _words(item: Mapping[str, Any], key: str) -> str:
    return escape(str(item.get(key) or "").strip())


def _pill(row: Change) -> str:
    if row.difference is None:
        return ""
    # A percentage of a negative or very small number has no meaning.
    share = row.difference / row.before if row.before and row.before > 0 else math.inf
    relative = f'<span class="share"> ({share:+.0%})</span>' if -1 <= share < 10 else ""
    arrow = "▲" if row.difference > 0 else "▼" if row.difference < 0 else "="
    return f'<span class="pill {row.verdict or "same"}">{arrow} {row.difference:+.4g}{relative} {row.verdict}</span>'
