"""`python -m benchmarks.estimators`: run every estimator with every seed, write a table and a plot.

What is finished is not run again: a run that was interrupted goes on where it stood.
"""

import argparse
import sys
import time
from pathlib import Path

from benchmarks.estimators.runs import ESTIMATORS, STEPS

HOME = Path("runs/estimators")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimators", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED",
                        help="seeds of data order, sampling and mini-batches (default: 0 1 2)")
    parser.add_argument("--only", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS), metavar="ESTIMATOR",
                        help=f"run these ones; some of {', '.join(ESTIMATORS)}")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N",
                        help="updates of 128 samples in each run (default: %(default)s)")
    parser.add_argument("--models", type=Path, metavar="DIR",
                        help="a quickstart's directory, whose data, SFT model and reward model are taken; "
                        f"made with seed 0 in {HOME / 'models'} when not given")
    parser.add_argument("--dir", type=Path, default=HOME, metavar="DIR",
                        help="where runs, tables and plots are written (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Run what was asked for and report on all of it."""
    asked = arguments()
    from rlhf_ray.cli.library_logging import quiet_libraries

    quiet_libraries()
    from benchmarks.estimators.report import markdown, write_plots, write_tables
    from benchmarks.estimators.runs import models_of, run_all
    from benchmarks.machine import describe_machine
    from rlhf_ray.cluster.session import ray_session
    from rlhf_ray.config.run import ClusterConfig, PoolConfig
    from rlhf_ray.errors import RLHFError

    machine, began = describe_machine(), time.perf_counter()
    try:
        with ray_session(ClusterConfig(dashboard=False), {"default": PoolConfig(cpus=2)}, "estimators"):
            models = models_of(asked.models, asked.dir)
            outcomes = run_all(asked.only, asked.seeds, asked.steps, models, asked.dir)
    except RLHFError as error:
        sys.exit(f"error: {error}")
    written = [*write_tables(outcomes, machine, asked.dir), *write_plots(outcomes, asked.dir)]
    print(markdown(outcomes))
    print(f"{time.perf_counter() - began:.0f} s; written: {', '.join(map(str, written))}")
    failed = [f"{o.estimator} with seed {o.seed}" for of in outcomes.values() for o in of if not o.learned]
    if failed:
        sys.exit(f"did not learn: {', '.join(failed)}")


if __name__ == "__main__":
    main()
