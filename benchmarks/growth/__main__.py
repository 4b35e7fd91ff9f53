"""`python -m benchmarks.growth`: measure every role at every size and length, fit exponents, write tables and a plot.

A quarter of an hour on a quiet core. What is measured is kept, a role at a time: an interrupted study goes on.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.__main__ import RESULTS, one_thread_on_cpu
from benchmarks.growth.settings import SIZES


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    names = [size.name for size in SIZES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=names, default=names, metavar="SIZE",
                        help=f"measure these sizes; some of {', '.join(names)}")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                        help="where growth.json, growth.md and growth.svg are written (default: benchmarks/results)")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing and report on all there is."""
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; what was measured is kept"))
    one_thread_on_cpu()
    from benchmarks.growth.cells import FILE, Study, complete
    from benchmarks.growth.report import markdown, write_plot
    from benchmarks.machine import describe_machine
    from benchmarks.side_process import SideFailed
    from benchmarks.summary import commit

    if asked.again:
        (asked.results / FILE).unlink(missing_ok=True)
    study, began, failed = Study(asked.results), time.perf_counter(), ""
    run = {"commit": commit(), "machine": describe_machine()}
    try:
        for size in (size for size in SIZES if size.name in asked.sizes):
            for role in complete(study, size, run):
                print(f"{time.perf_counter() - began:6.0f} s  {size.name}: {role}", file=sys.stderr, flush=True)
    except SideFailed as error:
        failed = str(error)
    if study.cells:
        told = markdown(study.cells)
        (asked.results / "growth.md").write_text(told)
        plot = write_plot(study.cells, asked.results)
        print(told)
        print(f"{time.perf_counter() - began:.0f} s; written: {study.path}, {asked.results / 'growth.md'}, {plot}")
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    main()
