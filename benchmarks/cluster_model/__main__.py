"""`python -m benchmarks.cluster_model`: 8B, 70B and a mixture of experts on 8 to 1,024 GPUs, on paper.

Prints tables (the same batch on all GPUs, a batch that grows with them, published figures beside ours), and writes a
page and a plot. Where `python -m benchmarks.growth` has measured roles, the formulas are checked against them.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS
from benchmarks.cluster_model.run_shape import MODELS, RunShape
from rlhf_ray.planning.hardware import GPUS

NUMBERS = ("prompts", "samples_per_prompt", "longest_prompt", "longest_response", "mini_batches")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_model", description=__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="kind of GPU (default: %(default)s)")
    for name in NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(RunShape, name), metavar="N",
                            help="of the batch (default: %(default)s)")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic and a reward model instead of GRPO")
    parser.add_argument("--samples-per-gpu", type=int, default=32, metavar="N",
                        help="of the batch that grows with the GPUs (default: %(default)s)")
    parser.add_argument("--transport", choices=["nccl", "object_store"], default="nccl",
                        help="of published weights (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                        help="where growth.json is read and the files are written (default: benchmarks/results)")
    return parser.parse_args()


def main() -> None:
    """Predict, compare, check, write."""
    asked = arguments()
    from benchmarks.cluster_model.plots import write_svg
    from benchmarks.cluster_model.prediction import sweep
    from benchmarks.cluster_model.published import beside_ours
    from benchmarks.cluster_model.report import published_table, sweep_table, write_page

    run = RunShape(next(iter(MODELS.values())), gpus=8, gpu=asked.gpu, critic=asked.critic, transport=asked.transport,
                   **{name: getattr(asked, name) for name in NUMBERS})
    same, growing = sweep(run), sweep(run, samples_per_gpu=asked.samples_per_gpu)
    beside, (measured, words) = beside_ours(), checks(asked.results)
    told = "\n".join([
        f"The same {run.prompts * run.samples_per_prompt:,} samples on all GPUs:\n", sweep_table(same),
        f"{asked.samples_per_gpu} samples a GPU:\n", sweep_table(growing), published_table(beside), *words])
    asked.results.mkdir(parents=True, exist_ok=True)
    tables = asked.results / "cluster_model.md"
    tables.write_text(told, encoding="utf-8")
    written = [tables, write_svg(same, asked.results),
               write_page(same, beside, measured, run, told, asked.results)]
    print(told)
    print(f"written: {', '.join(map(str, written))}")


def checks(results: Path) -> tuple[list[Any], list[str]]:
    """Predictions of measured roles, and what they say of the formulas."""
    from benchmarks.cluster_model.check import fitted_hardware, predictions
    from benchmarks.cluster_model.report import checked, error_in_words
    from benchmarks.growth.cells import Study

    cells = Study(results).cells
    try:
        measured = predictions(cells)
    except ValueError as error:
        return [], [f"The formulas were not checked: {error}.\n"]
    return measured, [error_in_words(measured, fitted_hardware(cells)[0]) + "\n", checked(measured)]


if __name__ == "__main__":
    main()
