"""The results as one self-contained page: every figure against its goal, the spread of its repeats, the machines."""

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figure import TITLES, ordered, shown, shown_goal, shown_value, title
from benchmarks.page_charts import charts_of
from benchmarks.summary import Measured, RunFacts, Summary
from rlhf_ray.observability import html_page as html
from rlhf_ray.observability.progress import duration

FILE = "index.html"
DRAWINGS = {"growth.svg": "How cost grows with model size and length, role by role",
            "cluster_model.svg": "On paper: 8B, 70B and a mixture of experts on 8 to 1,024 GPUs"}
"""What other commands may have left beside the page."""


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
    details = {f"More about {name}": as_text(m.figure.more) for name, m in measured.items()}
    details |= {f"Machine of the run of {when(m.run)}": as_text(m.run.machine) for m in measured.values()}
    return html.page(
        Path(__file__).with_name("page.html"), charts_of(measured), kind="Benchmarks", title="Next to the goals",
        lead=verdict(measured), facts=facts(latest), notes=notes(summary, latest), tiles=tiles(summary),
        measured=measured, drawings={words: svg_url(svg) for words, svg in (drawings or {}).items()}, details=details,
        title_of=title, shown=shown, shown_value=shown_value, shown_goal=shown_goal, when=when)


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


def svg_url(svg: bytes) -> str:
    """An SVG as the source of an image, so that its styles stay its own."""
    return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"


def when(run: RunFacts) -> str:
    """A run's date and time as people read them."""
    return run.time.replace("T", " ")[:16] + " UTC"


def as_text(told: Any) -> str:
    """Plain data, indented; nothing for nothing."""
    return json.dumps(told, indent=2, default=str) if told else ""
