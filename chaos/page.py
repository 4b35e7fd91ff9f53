"""A chaos run as one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks.page import drawing
from chaos.picture import picture
from chaos.report import HEADINGS, figures, rows, seconds, wrong
from chaos.summary import Chaos
from rlhf_ray.observability import report_page as html

FILE = "index.html"
ABOUT = ("Each fault struck a victim in the state beside it, and was seen to take effect. docs/chaos.md says what each "
         "kind does, and what must hold afterwards.")
TILES = ("Faults survived", "Samples lost", "Samples trained on twice", "Wedges")
ALL = ("Run", "Fault", "State of the victim", "Noticed after", "Back after", "Outcome")


def write_page(chaos: Chaos, directory: Path) -> Path:
    """Write the page; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    path.write_text(page(chaos), encoding="utf-8")
    return path


def page(chaos: Chaos) -> str:
    """One HTML document."""
    told, numbers = chaos.plain(), figures(chaos)
    verdict = "Every fault was survived, and every invariant holds." if chaos.sound else "Something went wrong."
    facts = {"Seed": str(chaos.seed), "Command": chaos.command, "Commit": chaos.commit or "unknown",
             "Machine": f"{chaos.machine['cores']} cores, {chaos.machine['cpu']}",
             **{name: value for name, value in numbers.items() if name not in TILES}}
    faults = [(one["run"], one["kind"], one["state"], seconds(one["detection_s"]), seconds(one["recovery_s"]),
               "survived" if one["survived"] else one["problem"]) for one in told["faults"]]
    body = [
        html.header("Chaos", "Faults on purpose", verdict, facts, wrong(chaos)),
        html.tiles([html.Tile(name, numbers[name].partition(",")[0]) for name in TILES]),
        drawing("Updates, and faults on the way", picture(chaos.runs).encode()),
        table("By kind", HEADINGS, rows(chaos)),
        table("One by one", ALL, faults),
        html.folded_text("Runs", json.dumps(told["runs"], indent=2)),
        html.folded_text("Machine", json.dumps(chaos.machine, indent=2, default=str)),
        html.footer(ABOUT),
    ]
    return html.page("Chaos", body, [])


def table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of texts, in a card."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return (f'<h2>{escape(title)}</h2><div class="verdict card scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>")
