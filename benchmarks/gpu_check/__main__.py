"""What only a GPU can show: each check prints and saves its rows as they are measured, in a process of its own.

Without --part, all parts run whose packages are installed. --plan is for a GPU that can be had for minutes: it makes
the most valuable measurements first, several in one process, ends by its own clock, and lists what it did not come to.
All rows are printed again at the end, also when SIGTERM, Ctrl-C or a closed terminal ends it; profiles are files of the
directory. GPU_CHECK_COMMIT names the commit where the copy has no git.

A verdict is ok, WRONG, FAILED (an error), a figure (without a bound), or not run, with the reason.

Exit codes: 0 nothing is wrong, 1 something is, 2 there is no GPU, or a part was named whose packages are missing.
"""

import argparse
import math
import re
import signal
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS, PLANS, Part, chosen, one_check_each, text
from benchmarks.gpu_check.results import ROOT, Results, describe_machine
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.runner import rows_of


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="launch/gpu_check", description=__doc__, epilog=text(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=[*PARTS, *one_check_each()], default=[], metavar="PART",
                        help="run this part, or one check of it (learner:update); repeatable")
    parser.add_argument("--plan", choices=PLANS, help="run this plan")
    parser.add_argument("--measure", action="append", default=[], metavar="TEXT",
                        help="of checks with several measurements, those with this text in their names; repeatable")
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU: the same code, tiny sizes")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="save there; default: benchmarks/results_gpu/DATE-DEVICE, a rehearsal's in "
                             "benchmarks/results/gpu_check")
    parser.add_argument("--seconds", type=float, metavar="N",
                        help="end after N seconds; checks that are expected to take longer than is left are not run; "
                             "default: a plan's own, except in a rehearsal")
    asked = parser.parse_args()
    if asked.plan and asked.part:
        parser.error("--plan names the checks to run; leave out --part")
    if asked.seconds is not None and not asked.seconds > 0:
        parser.error(f"--seconds {asked.seconds:g} leaves no time to measure; name more than 0")
    return asked


def results_directory(gpus: list[Any]) -> Path:
    """The default of --out."""
    if not gpus:
        return ROOT / "benchmarks" / "results" / "gpu_check"
    device = re.sub("[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-")
    return ROOT / "benchmarks" / "results_gpu" / f"{datetime.now(UTC):%Y-%m-%d}-{device}"


def run(parts: list[Part], names: tuple[str, ...], results: Results, seconds: float, only: tuple[str, ...] = ()
        ) -> bool:
    """Run the parts, print and save their rows; returns whether nothing is wrong."""
    end, right = time.monotonic() + seconds, True
    for check in (check for part in parts for check in part.checks):
        print(f"\n{check.part}: {check.name}, which catches {check.catches}", flush=True)
        before = time.monotonic()
        for row in rows_of(check, names, results.log, end - before, only):
            now = time.monotonic()
            print(line(row, now - before), flush=True)
            results.add(check, row, now - before)
            before, right = now, right and not row.is_bad
    return right


def line(row: Row, seconds: float) -> str:
    """A row as it is printed."""
    note = f" ({row.note})" if row.note else ""
    return f"  {row.verdict:<8}{seconds:6.1f} s  {row.what}: {row.found or '-'}{note}"


def ended(results: Results, number: int, *_: Any) -> None:
    """On a signal: the table so far; then the processes are ended."""
    print(f"\n{results.table()}\nended by {signal.Signals(number).name}", flush=True)
    raise SystemExit(1)


def main() -> None:
    """Check, print, and say by the exit code how it went."""
    began, asked = time.monotonic(), arguments()
    from rlhf_ray.planning.local_machine import gpus_here

    gpus = [] if asked.cpu else gpus_here()
    if not gpus and not asked.cpu:
        print("gpu_check: no NVIDIA GPU here (nvidia-smi lists none); --cpu rehearses it on the CPU", file=sys.stderr)
        sys.exit(2)
    plan = PLANS.get(asked.plan)
    parts = plan.parts if plan else chosen(asked.part)
    if (asked.part or plan) and (lacking := {part.name: part.missing() for part in parts if part.missing()}):
        needs = "; ".join(f"--part {name} needs {', '.join(missing)}" for name, missing in lacking.items())
        print(f"gpu_check: {needs}: not installed here. launch/gpu_wheels collects them for an "
              "image without a network; make install EXTRA=gpu installs all", file=sys.stderr)
        sys.exit(2)
    directory, machine = asked.out or results_directory(gpus), describe_machine(gpus)
    try:
        results = Results(directory, machine)
    except OSError as error:
        sys.exit(f"gpu_check: --out {directory}: rows cannot be saved there ({error}); name another folder")
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for part in (part for part in PARTS.values() if not asked.part and not plan and part not in parts):
        print(f"not run: {part.name}, which needs {', '.join(part.missing())}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, partial(ended, results))
    seconds = asked.seconds or (plan.seconds if plan and gpus else math.inf)
    right = run(parts, tuple(gpu.name for gpu in gpus), results, seconds - (time.monotonic() - began),
                tuple(asked.measure))
    if plan:
        print(f"\n{results.table()}")
    print(f"\n{'nothing' if right else 'something'} is wrong; {results.directory} has rows.jsonl, table.md and log.txt")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
