"""The results as one self-contained page: every figure against its goal, the spread of its repeats, the machines."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.figure import TITLES, Figure, ordered, shown, shown_goal, shown_value, title
from benchmarks.page_charts import charts_of
from benchmarks.summary import Measured, RunFacts, Summary
from rlhf_ray.observability import report_page as html
from rlhf_ray.observability.progress import duration

FILE = "index.html"
HEADINGS = (("Figure", ""), ("Value", "num"), ("Goal", "num"), ("Lowest to highest", "num"), ("Ours", ""),
            ("Beside", ""), ("Measured", ""))
DRAWINGS = {"growth.svg": "How cost grows with model size and length, role by role",
            "cluster_model.svg": "On paper: a 70B policy on 64 to 1024 GPUs"}
"""What other commands may have left beside the page."""
ABOUT = ("Each ratio is of two sides measured in one run on one machine, in turns; its value is the median over the "
         "repeats. docs/benchmarks.md says what each side does.")


def write_page(summary: Summary, latest: RunFacts, directory: Path) -> Path:
    """Write the page of all that is known; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    drawings = {words: (directory / name).read_bytes() for name, words in DRAWINGS.items()
                if (directory / name).exists()}
    path.write_text(page(summary, latest, drawings), encoding="utf-8")
    return path


def page(summary: Summary, latest: RunFacts, drawings: Mapping[str, bytes] | None = None) -> str:
    """One HTML document.

    Args:
        drawings: more SVGs to show, by their titles.
    """
    measured = {name: summary.measured[name] for name in ordered(list(summary.measured))}
    charts = charts_of(measured)
    body = [
        html.header("Benchmarks", "Next to the goals", verdict(measured), facts(latest), notes(summary, latest)),
        html.tiles(tiles(summary)),
        table(measured),
        html.curves(charts),
        *(drawing(words, svg) for words, svg in (drawings or {}).items()),
        *(html.folded_text(f"More about {name}", as_text(m.figure.more)) for name, m in measured.items()),
        *(html.folded_text(f"Machine of the run of {when(run)}", as_text(run.machine))
          for run in {m.run.time: m.run for m in measured.values()}.values()),
        html.footer(ABOUT),
    ]
    return html.page("Benchmarks", body, charts)


def verdict(measured: dict[str, Measured]) -> str:
    """How many goals are reached."""
    reached = sum(m.figure.reached for m in measured.values())
    return f"{reached} of {len(measured)} measured figures reach their goal."


def facts(latest: RunFacts) -> dict[str, str]:
    """The latest run."""
    machine = latest.machine
    return {"Machine": f"{machine['cores']} cores, {machine['cpu']}", "Memory": f"{machine['memory_gb']} GB",
            "Command": latest.command, "Latest run": when(latest), "Commit": latest.commit or "unknown",
            "Load before it": f"{machine['load_average_1min']} (1 min)"}


def notes(summary: Summary, latest: RunFacts) -> list[str]:
    """What a reader must not overlook."""
    measured = summary.measured
    missed = [title(name) for name in ordered(list(measured)) if not measured[name].figure.reached]
    disturbed = [title(name) for name, m in measured.items() if m.figure.disturbed]
    elsewhere = [title(name) for name, m in measured.items() if m.run.time != latest.time]
    absent = [title(name) for name in TITLES if name not in measured]
    said = {
        "Missed": missed, "Not measured yet": absent, "Other processes took part of the cores during": disturbed,
        "Kept from earlier runs, of the date and commit beside them": elsewhere,
    }
    failed = [f"{name} failed in its last run: {why.strip().splitlines()[0]}" for name, why in summary.failed.items()]
    return [f"{what}: {', '.join(names)}." for what, names in said.items() if names] + failed


def tiles(summary: Summary) -> list[html.Tile]:
    """Counts and times."""
    figures = [m.figure for m in summary.measured.values()]
    reached = sum(figure.reached for figure in figures)
    return [
        html.Tile("Goals reached", str(reached), f"of {len(figures)} measured"),
        html.Tile("Goals missed", str(len(figures) - reached), "marked below"),
        html.Tile("Not measured yet", str(sum(name not in summary.measured for name in TITLES)),
                  f"of {len(TITLES)} promised"),
        html.Tile("All benchmarks take", duration(sum(summary.seconds.values())), f"{len(summary.seconds)} benchmarks"),
    ]


def table(measured: dict[str, Measured]) -> str:
    """A row a figure."""
    if not measured:
        return ""
    headings = "".join(f'<th class="{kind}">{name}</th>' for name, kind in HEADINGS)
    rows = "".join(row(name, m) for name, m in measured.items())
    return (f'<h2>Figures</h2><div class="verdict card scroll"><table><thead><tr>{headings}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>")


def row(name: str, measured: Measured) -> str:
    """A figure as a row; the pill says in words what its colour says."""
    figure = measured.figure
    pill = f'<span class="pill {"better" if figure.reached else "worse"}">{"reached" if figure.reached else "missed"}'
    cells = [
        ("", f"{escape(title(name))}<br><code>{escape(name)}</code>"),
        ("num", f"<b>{escape(shown_value(figure))}</b><br>{pill}</span>"),
        ("num", escape(shown_goal(figure))),
        ("num", escape(f"{min(figure.repeats):.3g} to {max(figure.repeats):.3g}")
         + f"<br>{len(figure.repeats)} repeats" + ("<br>disturbed" if figure.disturbed else "")),
        ("", side(figure.ours, figure, figure.ours_is)),
        ("", side(figure.theirs, figure, figure.theirs_is)),
        ("", f"{escape(when(measured.run))}<br><code>{escape(measured.run.commit)}</code>"),
    ]
    return "<tr>" + "".join(f'<td class="{kind}">{text}</td>' for kind, text in cells) + "</tr>"


def side(value: float | None, figure: Figure, what: str) -> str:
    """What a side is, and what it came to."""
    parts: Iterable[str] = (what, "" if value is None else shown(value, figure.unit))
    return "<br>".join(escape(part) for part in parts if part)


def drawing(title: str, svg: bytes) -> str:
    """An SVG as an image, so that its styles stay its own."""
    source = f"data:image/svg+xml;base64,{b64encode(svg).decode()}"
    return (f'<h2>{escape(title)}</h2><div class="card scroll"><img src="{source}" alt="{escape(title)}" '
            'style="width:100%;min-width:900px"></div>')


def when(run: RunFacts) -> str:
    """A run's date and time as people read them."""
    return run.time.replace("T", " ")[:16] + " UTC"


def as_text(told: Any) -> str:
    """Plain data, indented; nothing for nothing."""
    return json.dumps(told, indent=2, default=str) if told else ""
