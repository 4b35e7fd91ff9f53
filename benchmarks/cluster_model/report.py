"""The model's answers as Markdown tables and as a self-contained page."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.cluster_model.check import Prediction, typical_error
from benchmarks.cluster_model.plots import page_charts
from benchmarks.cluster_model.prediction import Predicted, Refused, Sweep
from benchmarks.cluster_model.published import FIRST_GOAL, Beside
from benchmarks.cluster_model.run_shape import RunShape
from benchmarks.growth.report import table
from benchmarks.growth.settings import LENGTHS, SIZES
from rlhf_ray.observability.html_page import page
from rlhf_ray.planning.hardware import Hardware

PARTS = ("generation", "scoring", "update", "publication", "transfer")
HEADS = ("model", "GPUs", "generate : score : train", "staleness", "step, s", *PARTS, "samples/s/GPU", "tokens/s/GPU",
         "efficiency", "bound by")
UNMEASURED = "predicted, not run on a GPU"


def sweep_table(found: Sweep) -> str:
    """A row for every model and number of GPUs. Efficiency is samples/s/GPU over the model's highest."""
    rows = []
    for model, made in found.items():
        highest = max((one.samples_per_gpu for one in made if isinstance(one, Predicted)), default=1.0)
        rows += [row(model, one, highest) for one in made]
    return table(HEADS, rows)


def row(model: str, made: Predicted | Refused, highest: float) -> list[str]:
    """One model on one number of GPUs."""
    if isinstance(made, Refused):
        return [model, f"{made.run.gpus:,}", made.reason, *[""] * (len(HEADS) - 3)]
    return [model, f"{made.run.gpus:,}", divided(made), str(made.run.staleness), number(made.step.seconds),
            *(number(made.parts[part]) for part in PARTS), f"{made.samples_per_gpu:.3g}", f"{made.tokens_per_gpu:,.0f}",
            f"{made.samples_per_gpu / highest:.0%}", made.step.bottleneck]


def divided(made: Predicted) -> str:
    """The GPUs of each side, with the size of an engine and the ZeRO stage."""
    of, models = made.division, 1 + made.run.critic
    return (f"{of.generators} (TP {of.tensor_parallel}) : {of.scorers * models} : {of.learners * models} "
            f"(ZeRO {of.zero_stage})")


def number(seconds: float) -> str:
    """Seconds with two digits that count."""
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


PUBLISHED_HEADS = ("system", "model, GPUs", "algorithm", "batch, lengths", "published step, s", "tokens/s/GPU",
                   "ours, s", f"ours at {FIRST_GOAL:.0%}, s", "ours, tokens/s/GPU", "ours / published")


def published_table(found: Sequence[Beside]) -> str:
    """Published figures, and ours for the same shape."""
    return (f"Ours: {UNMEASURED}.\n\n" + table(PUBLISHED_HEADS, [compared(beside) for beside in found]))


def compared(beside: Beside) -> list[str]:
    """One published row."""
    row, ours, slower = beside.row, beside.ours, beside.slower
    lengths = f"{row.prompt} + {row.response:,} tokens" if row.prompt is not None and row.response is not None else (
        f"up to {row.longest_prompt:,} + {row.longest_response:,}; half of it assumed")
    told = [f"[{row.system}]({row.url}), {row.date}", f"{row.model}, {row.gpus} {row.gpu.upper()}", row.algorithm,
            f"{row.prompts} x {row.samples_per_prompt}, {lengths}", number(row.seconds),
            f"{row.tokens_per_gpu:,.0f}" if row.tokens_per_gpu else "-"]
    if isinstance(ours, Refused):
        return [*told, ours.reason, "", "", ""]
    late = number(slower.step.seconds) if isinstance(slower, Predicted) else "-"
    rate = f"{ours.tokens_per_gpu:,.0f}" if row.tokens_per_gpu else "-"
    return [*told, number(ours.step.seconds), late, rate, f"{ours.step.seconds / row.seconds:.2f}"]


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


def write_page(
    same: Sweep, beside: Sequence[Beside], found: Sequence[Prediction], run: RunShape, told: str, directory: Path,
) -> Path:
    """Write the page; `told` are the tables in Markdown, folded away there. Returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PAGE
    rows = [[cell for n, cell in enumerate(compared(one)) if n not in (2, 3)] for one in beside]
    for one, cells in zip(beside, rows, strict=True):
        cells[0] = one.row.system
    path.write_text(page(
        Path(__file__).with_name("report.html"), page_charts(same, found), kind="On paper",
        title="8B, 70B and a mixture of experts on 8 to 1,024 GPUs", lead=f"All our figures: {UNMEASURED}.",
        facts=facts(run), headings=[head for n, head in enumerate(PUBLISHED_HEADS) if n not in (2, 3)], steps=rows,
        tables=told, machine=inputs(run.hardware)), encoding="utf-8")
    return path


def facts(run: RunShape) -> dict[str, str]:
    """The question."""
    return {"GPU": run.hardware.name, "Samples an update": f"{run.prompts * run.samples_per_prompt:,}",
            "Prompt": f"up to {run.longest_prompt:,} tokens, half of it on average",
            "Response": f"up to {run.longest_response:,} tokens, half of it on average",
            "Algorithm": "PPO with a critic and a reward model" if run.critic else "GRPO with a reference",
            "Optimizer steps": f"{run.mini_batches} a batch"}


def inputs(hardware: Hardware) -> str:
    """Every number that is put in; where each comes from stands in rlhf_ray/planning/hardware.py."""
    return "\n".join(f"{name:20} {value:g}" if isinstance(value, float) else f"{name:20} {value}"
                     for name, value in asdict(hardware).items())
