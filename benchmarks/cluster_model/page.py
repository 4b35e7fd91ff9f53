"""The paper model as one self-contained page."""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from benchmarks.cluster_model.check import Prediction
from benchmarks.cluster_model.plots import page_charts
from benchmarks.cluster_model.study import Answer
from rlhf_ray.observability import report_page as html
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.roofline import Workload

PAGE = "cluster_model.html"


def write_page(
    answers: Sequence[Answer], found: Sequence[Prediction], hardware: Hardware, work: Workload, told: str,
    directory: Path,
) -> Path:
    """Write the page; `told` are the tables in Markdown, folded away there. Returns its path."""
    charts = page_charts(answers, found)
    body = [
        html.header("On paper", "A 70B policy on many GPUs", advice(answers), facts(hardware, work), []),
        steps_table(answers),
        html.curves(charts),
        html.folded_text("All tables", told),
        html.folded_text("What the machine is taken to do", inputs(hardware)),
        html.footer("Arithmetic, not a measurement: no such cluster was at hand. docs/benchmarks.md says how the "
                    "formulas were checked."),
    ]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PAGE
    path.write_text(html.page("A 70B policy on many GPUs", body, charts), encoding="utf-8")
    return path


def advice(answers: Sequence[Answer]) -> str:
    """The recommended staleness at each number of GPUs."""
    return "Least staleness within 2% of the fastest: " + ", ".join(
        f"{a.recommended.split.staleness} on {a.gpus} GPUs" for a in answers) + "."


def facts(hardware: Hardware, work: Workload) -> dict[str, str]:
    """The question."""
    return {"GPU": hardware.name, "Samples an update": f"{work.samples:,}", "Prompt": f"{work.prompt} tokens",
            "Response": f"{work.response:,} tokens on average, up to {work.tail * work.response:,.0f}",
            "Optimizer steps": f"{work.mini_batches} a batch, {work.epochs} epoch(s)"}


def steps_table(answers: Sequence[Answer]) -> str:
    """The recommended split of each number of GPUs."""
    heads = (("GPUs", "num"), ("Staleness", "num"), ("Generators", "num"), ("Learners", "num"), ("Step", "num"),
             ("Samples a second", "num"), ("Staleness 0 would take", "num"), ("Bound by", ""))
    rows = "".join("<tr>" + "".join(f'<td class="{kind}">{escape(text)}</td>' for (_, kind), text in zip(heads, (
        f"{a.gpus:,}", str(a.recommended.split.staleness), str(a.recommended.split.generators),
        str(a.recommended.split.learners), f"{a.recommended.seconds:.1f} s",
        f"{a.recommended.samples_per_second:.1f}", f"{a.by_staleness[0].seconds:.1f} s", a.recommended.bound,
    ), strict=True)) + "</tr>" for a in answers)
    headings = "".join(f'<th class="{kind}">{name}</th>' for name, kind in heads)
    return (f'<h2>Recommended</h2><div class="verdict card scroll"><table><thead><tr>{headings}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>")


def inputs(hardware: Hardware) -> str:
    """Every number that is put in; where each comes from stands in rlhf_ray/planning/hardware.py."""
    return "\n".join(f"{name:20} {value:g}" if isinstance(value, float) else f"{name:20} {value}"
                     for name, value in asdict(hardware).items())
