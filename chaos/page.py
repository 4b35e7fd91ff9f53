"""A chaos campaign as a self-contained page, and as a picture (SVG): updates over time, each fault where it was
injected, and the times without a driver. The picture needs no JavaScript and is readable on light and dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from benchmarks.page import svg_url
from benchmarks.svg import STYLE, Axis, axis
from chaos.kinds import KINDS
from chaos.summary import HEADINGS, CampaignSummary, FinishedRun, figures, not_tried, problems, rows, seconds
from rlhf_ray.observability import html_page as html
from rlhf_ray.observability.metrics import read_metrics

PAGE_FILE, PICTURE_FILE = "index.html", "timeline.svg"
TILES = ("Faults survived", "Samples lost", "Samples trained on twice", "Wedges")
COLUMNS = ("Run", "Fault", "State of the victim", "Noticed after", "Back after", "Outcome")
WIDTH, HEIGHT, MARGIN, KEY = 900, 150, 48, 24
LETTER = 6.4
"""Approximate width of a letter of the key."""
COLOURS = {
    "worker": ("#2a78d6", "generator, scorer, assembler"), "node": ("#159a6c", "node"),
    "learner": ("#5b48b8", "learner"), "numbers": ("#d8578f", "loss or gradient"),
    "service": ("#c98a00", "reward service"), "environment": ("#6f8f1f", "environment"),
    "driver": ("#c0392b", "driver, failpoint, disk"),
    "network": ("#6b7280", "message"), "disturbance": ("#0b8793", "around the run"),
    "checkpoint": ("#8a5a2b", "checkpoint"),
}
"""Colour and text of the key by `Kind.colour`."""
MORE_STYLE = ".down{fill:#c0392b22}.updates{fill:none;stroke:#8a939e;stroke-width:1.5}"


def write_page(campaign: CampaignSummary, directory: Path) -> Path:
    """Write the page; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PAGE_FILE
    path.write_text(page(campaign), encoding="utf-8")
    return path


def page(campaign: CampaignSummary) -> str:
    """One HTML document."""
    data, numbers = campaign.as_dict(), figures(campaign)
    verdict = "Every fault was survived, and every invariant holds." if campaign.sound else "Something went wrong."
    facts = {"Seed": str(campaign.seed), "Command": campaign.command, "Commit": campaign.commit or "unknown",
             "Machine": f"{campaign.machine['cores']} cores, {campaign.machine['cpu']}",
             **{name: value for name, value in numbers.items() if name not in TILES}}
    faults = [(fault["run"], fault["kind"], fault["state"], seconds(fault["detection_s"]), seconds(fault["recovery_s"]),
               "survived" if fault["survived"] else fault["problem"]) for fault in data["faults"]]
    return html.page(
        Path(__file__).with_name("page.html"), kind="Chaos", title="Faults on purpose", lead=verdict, facts=facts,
        notes=[*problems(campaign), *not_tried(campaign)],
        tiles=[html.Tile(name, numbers[name].partition(",")[0]) for name in TILES],
        picture=svg_url(picture(campaign.runs).encode()), kind_headings=HEADINGS, kinds=rows(campaign),
        fault_headings=COLUMNS, faults=faults, runs=json.dumps(data["runs"], indent=2),
        machine=json.dumps(campaign.machine, indent=2, default=str))


def write_picture(campaign: CampaignSummary, directory: Path) -> Path:
    """Write the picture; returns its path."""
    path = directory / PICTURE_FILE
    path.write_text(picture(campaign.runs), encoding="utf-8")
    return path


def picture(runs: Sequence[FinishedRun]) -> str:
    """One panel for each run, below each other, and a key."""
    panels = "".join(f'<g transform="translate({MARGIN},{MARGIN + place * (HEIGHT + 2 * MARGIN)})">{panel(run)}</g>'
                     for place, run in enumerate(runs))
    height = len(runs) * (HEIGHT + 2 * MARGIN)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * MARGIN} {height + KEY}" role="img">'
            f"<style>{STYLE}{MORE_STYLE}</style>{panels}{''.join(_key(height))}</svg>\n")


def panel(run: FinishedRun) -> str:
    """The panel of one run."""
    progress = _progress(run)
    across = axis([run.seconds], False)
    up = axis([step for _, step in progress], False)
    title = f"{run.name}: {sum(o.survived for o in run.outcomes)} of {len(run.outcomes)} faults survived"
    return "".join([f'<text class="title" y="-14">{escape(title)}</text>', *_grid(across, up),
                    *_down(run, across), _updates(progress, across, up), *_faults(run, across, up)])


def _progress(run: FinishedRun) -> list[tuple[float, float]]:
    """(seconds since the first start, updates made) at every line of the injection log and the metrics."""
    began, log = run.record.starts[0].began, run.record.injections
    lines = [*log.read("loop"), *log.read("injected"), *read_metrics(run.record.directory)]
    return sorted((line["time"] - began, line["step"]) for line in lines if "step" in line and "time" in line)


def _grid(across: Axis, up: Axis) -> Iterator[str]:
    for x in across.ticks:
        at = WIDTH * across.place(x)
        yield (f'<path class="grid" d="M{at:.1f} 0V{HEIGHT}"/>'
               f'<text x="{at:.1f}" y="{HEIGHT + 16}" text-anchor="middle">{x:g} s</text>')
    for y in up.ticks:
        at = HEIGHT * (1 - up.place(y))
        yield (f'<path class="grid" d="M0 {at:.1f}H{WIDTH}"/>'
               f'<text x="-8" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')


def _down(run: FinishedRun, across: Axis) -> Iterator[str]:
    """The times without a training loop: from a driver's end, or the beginning, to the next loop."""
    began, loops = run.record.starts[0].began, [line["time"] for line in run.record.injections.read("loop")]
    for end in (began, *(start.ended for start in run.record.starts[:-1])):
        again = min((time for time in loops if time >= end), default=end)
        left, right = (WIDTH * across.place(time - began) for time in (end, again))
        yield f'<rect class="down" x="{left:.1f}" width="{right - left:.1f}" height="{HEIGHT}"/>'


def _updates(progress: Sequence[tuple[float, float]], across: Axis, up: Axis) -> str:
    points = " ".join(f"{WIDTH * across.place(x):.1f},{HEIGHT * (1 - up.place(y)):.1f}" for x, y in progress)
    return f'<polyline class="updates" points="{points}"/>'


def _faults(run: FinishedRun, across: Axis, up: Axis) -> Iterator[str]:
    """A dot for each fault, hollow where it was not survived, with a tooltip."""
    began, step, problems = run.record.starts[0].began, 0, {o.fault.number: o.problem for o in run.outcomes}
    for line in run.record.injections.read("injected"):
        step = line.get("step", step)
        x, y = WIDTH * across.place(line["time"] - began), HEIGHT * (1 - up.place(step))
        colour, problem = COLOURS[KINDS[line["kind"]].colour][0], problems.get(line["fault"], "")
        words = f"{line['kind']}: {problem or line['state']}"
        yield (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{"none" if problem else colour}" stroke="{colour}">'
               f"<title>{escape(words)}</title></circle>")


def _key(y: float) -> Iterator[str]:
    x = float(MARGIN)
    for colour, words in COLOURS.values():
        yield (f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4.5" fill="{colour}" stroke="{colour}"/>'
               f'<text x="{x + 9:.0f}" y="{y + 4:.0f}">{escape(words)}</text>')
        x += 32 + LETTER * len(words)
