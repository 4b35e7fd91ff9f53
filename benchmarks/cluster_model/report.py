"""The model's answers as Markdown tables and as a self-contained page."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from benchmarks.cluster_model.check import Prediction, typical_error
from benchmarks.cluster_model.gpu_split import Answer, Step
from benchmarks.cluster_model.plots import page_charts
from benchmarks.growth.report import table
from benchmarks.growth.settings import LENGTHS, SIZES
from rlhf_ray.observability.html_page import page
from rlhf_ray.planning.hardware import Hardware
from rlhf_ray.planning.roofline import Workload

STEP_HEADS = ("GPUs", "staleness", "generators : learners", "tensor parallel", "step, s", "generation", "scoring",
              "training", "publishing", "samples/s", "bound by")


def every_step(answers: Sequence[Answer]) -> str:
    """A row for every number of GPUs and staleness, and one for roles that take turns; the recommended are bold."""
    rows = [row(made, made is answer.recommended) for answer in answers
            for made in (*answer.by_staleness, *([answer.turns] if answer.turns else []))]
    return table(STEP_HEADS, rows)


def row(made: Step, bold: bool) -> list[str]:
    """One step."""
    split, mark = made.split, "**" if bold else ""
    whole = split.generators if made.shared else split.generators + split.learners
    return [
        f"{mark}{whole}{mark}", f"{mark}{split.staleness}{mark}",
        "all take turns" if made.shared else f"{split.generators} : {split.learners}",
        str(split.tensor_parallel), f"{mark}{made.seconds:.1f}{mark}", f"{made.generation:.1f}", f"{made.scoring:.1f}",
        f"{made.training:.1f}", f"{made.publishing:.2f}", f"{made.samples_per_second:.1f}", made.bound,
    ]


def growing(answers: Sequence[Answer]) -> str:
    """What each doubling of GPUs brings, at the recommended staleness and at none."""
    rows = []
    for before, after in pairwise(answers):
        rows.append([f"{before.gpus} to {after.gpus}", efficiency(before.recommended, after.recommended),
                     efficiency(before.by_staleness[0], after.by_staleness[0]), after.recommended.bound])
    return table(("GPUs", "efficiency of doubling", "with staleness 0", "then bound by"), rows)


def efficiency(before: Step, after: Step) -> str:
    """Twice the GPUs: the gain over 2."""
    return f"{after.samples_per_second / before.samples_per_second / 2:.0%}"


def checked(found: Sequence[Prediction]) -> str:
    """Predicted / measured of every cell; constants come from those in brackets."""
    heads = ["activity", "model", *(f"{length} tokens" for length in LENGTHS)]
    rows = []
    for activity in dict.fromkeys(p.cell.activity for p in found):
        for size in SIZES:
            of = {p.cell.length: p for p in found if p.cell.activity == activity and p.cell.size == size.name}
            lengths = [0, *[None] * (len(LENGTHS) - 1)] if 0 in of else LENGTHS
            if of:
                rows.append([activity, size.name, *(ratio(of.get(n)) if n is not None else "" for n in lengths)])
    return table(heads, rows)


def ratio(found: Prediction | None) -> str:
    """Two digits behind the point."""
    if found is None:
        return "-"
    return f"({found.ratio:.2f})" if found.fitted else f"{found.ratio:.2f}"


def error_in_words(found: Sequence[Prediction], core: Hardware) -> str:
    """How far off, and with which constants."""
    others = [p for p in found if not p.fitted]
    worst = max(others, key=lambda p: max(p.ratio, 1 / p.ratio))
    cell = ", ".join([worst.cell.activity, worst.cell.size, *([f"{n} tokens"] if (n := worst.cell.length) else [])])
    return (f"{len(others)} cells predicted from {len(found) - len(others)}: off by {typical_error(found):.0%} in the "
            f"median, at worst by a factor of {max(worst.ratio, 1 / worst.ratio):.1f} ({cell}). "
            f"Constants of one core: {core.flops / 1e9:.0f} GFLOP/s "
            f"forward, {core.flops * core.training_share / 1e9:.0f} in training, "
            f"{core.memory_bandwidth / 1e9:.1f} GB/s while decoding, {core.step_s * 1e3:.1f} ms a decoding step, "
            f"{core.network_bandwidth / 1e9:.1f} GB/s sending and {core.host_bandwidth / 1e9:.1f} GB/s receiving "
            "weights.")


PAGE = "cluster_model.html"
RECOMMENDED_HEADS = ("GPUs", "Staleness", "Generators", "Learners", "Step", "Samples a second",
                     "Staleness 0 would take", "Bound by")


def write_page(
    answers: Sequence[Answer], found: Sequence[Prediction], hardware: Hardware, work: Workload, told: str,
    directory: Path,
) -> Path:
    """Write the page; `told` are the tables in Markdown, folded away there. Returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PAGE
    path.write_text(page(
        Path(__file__).with_name("report.html"), page_charts(answers, found), kind="On paper",
        title="A 70B policy on many GPUs", lead=advice(answers), facts=facts(hardware, work),
        headings=RECOMMENDED_HEADS, steps=[recommended(answer) for answer in answers], tables=told,
        machine=inputs(hardware)), encoding="utf-8")
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


def recommended(answer: Answer) -> list[str]:
    """The cells of one number of GPUs."""
    best = answer.recommended
    return [f"{answer.gpus:,}", str(best.split.staleness), str(best.split.generators), str(best.split.learners),
            f"{best.seconds:.1f} s", f"{best.samples_per_second:.1f}", f"{answer.by_staleness[0].seconds:.1f} s",
            best.bound]


def inputs(hardware: Hardware) -> str:
    """Every number that is put in; where each comes from stands in rlhf_ray/planning/hardware.py."""
    return "\n".join(f"{name:20} {value:g}" if isinstance(value, float) else f"{name:20} {value}"
                     for name, value in asdict(hardware).items())
