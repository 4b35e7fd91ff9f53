"""`python -m benchmarks.cluster_model`: a 70B policy on 64 to 1024 GPUs, on paper; tables, a page and a plot.

Where `python -m benchmarks.growth` has measured roles, the formulas are checked against them.
"""

import argparse
from dataclasses import fields
from pathlib import Path

from benchmarks.__main__ import RESULTS
from rlhf_ray.planning.hardware import GPUS
from rlhf_ray.planning.roofline import Workload


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_model", description=__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="kind of GPU (default: %(default)s)")
    for field in fields(Workload):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default,
                            metavar="N", help="of the workload (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                        help="where growth.json is read and the files are written (default: benchmarks/results)")
    return parser.parse_args()


def main() -> None:
    """Answer, check, write."""
    asked = arguments()
    from benchmarks.cluster_model.check import fitted_hardware, predictions
    from benchmarks.cluster_model.gpu_split import answers
    from benchmarks.cluster_model.plots import write_svg
    from benchmarks.cluster_model.report import checked, error_in_words, every_step, growing, write_page
    from benchmarks.growth.cells import Study

    hardware = GPUS[asked.gpu]
    work = Workload(**{field.name: getattr(asked, field.name) for field in fields(Workload)})
    found, cells = answers(hardware, work), Study(asked.results).cells
    told = [every_step(found), growing(found)]
    measured = []
    try:
        measured = predictions(cells)
        told += [error_in_words(measured, fitted_hardware(cells)[0]) + "\n", checked(measured)]
    except ValueError as error:
        told.append(f"The formulas were not checked: {error}.\n")
    asked.results.mkdir(parents=True, exist_ok=True)
    tables = asked.results / "cluster_model.md"
    tables.write_text("\n".join(told))
    written = [tables, write_svg(found, asked.results),
               write_page(found, measured, hardware, work, "\n".join(told), asked.results)]
    print("\n".join(told))
    print(f"written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
