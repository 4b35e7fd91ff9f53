"""Line charts side by side as one SVG: no library, no JavaScript, readable in light and dark pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log, log10

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
    """Curves over common axes, which begin at 0, or are logarithmic."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    logarithmic: bool = False


@dataclass(frozen=True)
class Axis:
    """Round numbers from one end to the other."""

    ticks: Sequence[float]
    logarithmic: bool

    def place(self, value: float) -> float:
        """0 at the axis' first number, 1 at its last; values before the first stand on it."""
        first, last = self.ticks[0], self.ticks[-1]
        if value <= first:
            return 0.0
        return log(value / first) / log(last / first) if self.logarithmic else (value - first) / (last - first)


def axis(values: Sequence[float], logarithmic: bool) -> Axis:
    """An axis that holds the values."""
    if logarithmic and values:
        return Axis(logarithmic_ticks(min(values), max(values)), True)
    return Axis(ticks(max(values, default=1.0)), False)


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
    points = [point for line in chart.lines for point in line.points]
    across, up = (axis([point[i] for point in points], chart.logarithmic) for i in (0, 1))
    parts = [f'<text class="title" y="-20">{escape(chart.title)}</text>',
             f'<text x="{width / 2}" y="{height + 42}" text-anchor="middle">{escape(chart.x)}</text>',
             f'<text transform="translate(-40,{height / 2}) rotate(-90)" text-anchor="middle">{escape(chart.y)}</text>']
    for x in across.ticks:
        at = width * across.place(x)
        parts.append(f'<path class="grid" d="M{at:.1f} 0V{height}"/>'
                     f'<text x="{at:.1f}" y="{height + 18}" text-anchor="middle">{x:,g}</text>')
    for y in up.ticks:
        at = height * (1 - up.place(y))
        parts.append(f'<path class="grid" d="M0 {at:.1f}H{width}"/>'
                     f'<text x="-8" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    return "".join(parts) + "".join(curve(line, across, up) for line in chart.lines)


def curve(line: Line, across: Axis, up: Axis) -> str:
    """One curve; on logarithmic axes its points are few, and are marked."""
    places = [(PANEL[0] * across.place(x), PANEL[1] * (1 - up.place(y))) for x, y in line.points]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in places)
    return (f'<polyline class="line" stroke="{line.colour}" points="{points}"><title>{escape(line.name)}</title>'
            f"</polyline>{dots if across.logarithmic else ''}")


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


def logarithmic_ticks(lowest: float, highest: float) -> list[float]:
    """1, 2 and 5 times powers of ten from the last one not above `lowest` to the first not below `highest`; powers of
    ten alone, where that would be more than eight."""
    decades = range(floor(log10(lowest)), floor(log10(highest)) + 2)
    for steps in ((1.0, 2.0, 5.0), (1.0,)):
        every = [step * 10.0**decade for decade in decades for step in steps]
        first = max(i for i, tick in enumerate(every) if tick <= lowest * 1.000001)
        last = min(i for i, tick in enumerate(every) if tick >= highest * 0.999999 and i > first)
        if last - first < 8:
            break
    return [float(f"{tick:.3g}") for tick in every[first : last + 1]]
