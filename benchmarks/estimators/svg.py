"""Line charts side by side as one SVG: no library, no JavaScript, readable in light and dark pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PANEL, GAP = (460, 300), 64
"""Width and height of a chart's plotting area, and the room around it, in pixels."""
KEY_LINE = 18
STYLE = ("text{font:12px system-ui,sans-serif;fill:#555}.title{font-weight:600;font-size:14px;fill:#222}"
         ".grid{stroke:#8884;stroke-width:1}.line{fill:none;stroke-width:2}"
         "@media(prefers-color-scheme:dark){text{fill:#aaa}.title{fill:#eee}}")


@dataclass(frozen=True)
class Line:
    """One named curve."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Curves over common axes, which begin at 0."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]


def drawing(charts: Sequence[Chart]) -> str:
    """The charts in a row, and one key below them for the lines of the first."""
    width = len(charts) * (PANEL[0] + 2 * GAP)
    rows = -(-len(charts[0].lines) // 4)
    height = PANEL[1] + 2 * GAP + rows * KEY_LINE
    panels = "".join(f'<g transform="translate({GAP + i * (PANEL[0] + 2 * GAP)},{GAP})">{panel(chart)}</g>'
                     for i, chart in enumerate(charts))
    key = "".join(key_entry(line, GAP + (i % 4) * (width - 2 * GAP) / 4, PANEL[1] + 2 * GAP + (i // 4) * KEY_LINE)
                  for i, line in enumerate(charts[0].lines))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
            f"<style>{STYLE}</style>{panels}{key}</svg>\n")


def panel(chart: Chart) -> str:
    """One chart: title, axes, grid, curves."""
    width, height = PANEL
    xs = ticks(max((x for line in chart.lines for x, _ in line.points), default=1.0))
    ys = ticks(max((y for line in chart.lines for _, y in line.points), default=1.0))
    parts = [f'<text class="title" y="-20">{escape(chart.title)}</text>',
             f'<text x="{width / 2}" y="{height + 42}" text-anchor="middle">{escape(chart.x)}</text>',
             f'<text transform="translate(-40,{height / 2}) rotate(-90)" text-anchor="middle">{escape(chart.y)}</text>']
    for x in xs:
        at = width * x / xs[-1]
        parts.append(f'<path class="grid" d="M{at:.1f} 0V{height}"/>'
                     f'<text x="{at:.1f}" y="{height + 18}" text-anchor="middle">{x:,g}</text>')
    for y in ys:
        at = height * (1 - y / ys[-1])
        parts.append(f'<path class="grid" d="M0 {at:.1f}H{width}"/>'
                     f'<text x="-8" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    return "".join(parts) + "".join(curve(line, width / xs[-1], height / ys[-1]) for line in chart.lines)


def curve(line: Line, x_scale: float, y_scale: float) -> str:
    """One curve; values below 0 are drawn on the axis."""
    points = " ".join(f"{max(x, 0) * x_scale:.1f},{PANEL[1] - max(y, 0) * y_scale:.1f}" for x, y in line.points)
    return (f'<polyline class="line" stroke="{line.colour}" points="{points}"><title>{escape(line.name)}</title>'
            "</polyline>")


def key_entry(line: Line, x: float, y: float) -> str:
    """A stroke of the line's colour and its name."""
    return (f'<path class="line" stroke="{line.colour}" d="M{x:.0f} {y:.0f}h22"/>'
            f'<text x="{x + 28:.0f}" y="{y + 4:.0f}">{escape(line.name)}</text>')


def ticks(highest: float) -> list[float]:
    """Three to eight round numbers from 0 to the first one that is not below `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    magnitude = 1.0
    while magnitude * 10 <= highest:
        magnitude *= 10
    while magnitude > highest:
        magnitude /= 10
    step = next(s for s in (0.2, 0.5, 1.0, 2.0) if highest / (s * magnitude) <= 7) * magnitude
    return [round(step * i, 12) for i in range(int(-(-highest // step)) + 1)]
