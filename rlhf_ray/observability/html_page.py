"""Self-contained HTML pages from Jinja2 templates: every text is escaped, and everything a page needs is inside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf_ray.observability.metric_catalogue import readable
from rlhf_ray.observability.report_charts import Chart
from rlhf_ray.observability.tables import number

ASSETS = Path(__file__).with_name("assets")


class Tile(NamedTuple):
    """One number at the top of the page."""

    label: str
    value: str
    was: str = ""


def page(template: Path, charts: Sequence[Chart] = (), **values: Any) -> str:
    """The page of a template that extends base.html.

    Args:
        template: may include or import the files beside it and the assets of this package.
        charts: plots; a page that has some holds plotly.js (4.8 MB).
        values: of the template. All templates have kind, title, lead and facts, and may have notes and tiles.
    """
    environment = Environment(loader=FileSystemLoader([template.parent, ASSETS]), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"number": number, "readable": readable}
    if charts:
        from plotly.offline import get_plotlyjs

        values |= {"plotly_js": get_plotlyjs(), "figures": figures_json(charts)}
    return environment.get_template(template.name).render({"notes": (), "tiles": (), "charts": charts, **values})


def figures_json(charts: Iterable[Chart]) -> str:
    """Figures as JSON that cannot end its script element."""
    figures = [{"data": [trace.to_plotly_json() for trace in c.data], "layout": c.layout.to_plotly_json()}
               for c in charts]
    return json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
