"""What only a GPU can show: each check prints and saves its rows as they are measured, in a process of its own.

Without --part, all parts run whose packages are installed. A verdict is ok, WRONG, FAILED (an error), a figure (without
a bound), or not run, with the reason.

Exit codes: 0 nothing is wrong, 1 something is, 2 there is no GPU, or a part was named whose packages are missing.
"""

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS, Part, chosen, one_check_each, text
from benchmarks.gpu_check.results import ROOT, Results, describe_machine
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.runner import rows_of


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="launch/gpu_check", description=__doc__, epilog=text(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=[*PARTS, *one_check_each()], default=[], metavar="PART",
                        help="run this part, or one check of it (learner:update); repeatable")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU: the same code, tiny sizes")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="save there; default: benchmarks/results_gpu/DATE-DEVICE, a rehearsal's in "
                             "benchmarks/results/gpu_check")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N",
                        help="end after N seconds; checks that are expected to take longer than is left are not run")
    return parser.parse_args()


def results_directory(gpus: list[Any]) -> Path:
    """The default of --out."""
    if not gpus:
        return ROOT / "benchmarks" / "results" / "gpu_check"
    device = re.sub("[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-")
    return ROOT / "benchmarks" / "results_gpu" / f"{datetime.now(UTC):%Y-%m-%d}-{device}"


def run(parts: list[Part], names: tuple[str, ...], results: Results, seconds: float) -> bool:
    """Run the parts, print and save their rows; returns whether nothing is wrong."""
    end, right = time.monotonic() + seconds, True
    for check in (check for part in parts for check in part.checks):
        print(f"\n{check.part}: {check.name}, which catches {check.catches}", flush=True)
        before = time.monotonic()
        for row in rows_of(check, names, results.log, end - before):
            now = time.monotonic()
            print(line(row, now - before), flush=True)
            results.add(check, row, now - before)
            before, right = now, right and not row.is_bad
    return right


def line(row: Row, seconds: float) -> str:
    """A row as it is printed."""
    note = f" ({row.note})" if row.note else ""
    return f"  {row.verdict:<8}{seconds:6.1f} s  {row.what}: {row.found or '-'}{note}"


def main() -> None:
    """Check, print, and say by the exit code how it went."""
    asked = arguments()
    from rlhf_ray.planning.local_machine import gpus_here

    gpus = [] if asked.cpu else gpus_here()
    if not gpus and not asked.cpu:
        print("gpu_check: no NVIDIA GPU here (nvidia-smi lists none); --cpu rehearses it on the CPU", file=sys.stderr)
        sys.exit(2)
    parts = chosen(asked.part)
    if asked.part and (lacking := {part.name: part.missing() for part in parts if part.missing()}):
        needs = "; ".join(f"--part {name} needs {', '.join(missing)}" for name, missing in lacking.items())
        print(f"gpu_check: {needs}: not installed here. launch/gpu_wheels makes a folder of the wheels for learner; "
              "make install EXTRA=gpu installs all", file=sys.stderr)
        sys.exit(2)
    results = Results(asked.out or results_directory(gpus), machine := describe_machine(gpus))
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for part in (part for part in PARTS.values() if not asked.part and part not in parts):
        print(f"not run: {part.name}, which needs {', '.join(part.missing())}")
    right = run(parts, tuple(gpu.name for gpu in gpus), results, asked.seconds)
    print(f"\n{'nothing' if right else 'something'} is wrong; {results.directory} has rows.jsonl, table.md and log.txt")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
