"""The model's answers as Markdown."""

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.cluster_model.check import Prediction, typical_error
from benchmarks.cluster_model.gpu_split import Step
from benchmarks.cluster_model.study import Answer
from benchmarks.growth.settings import LENGTHS, SIZES
from benchmarks.growth.table import table
from rlhf_ray.planning.hardware import Hardware

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
