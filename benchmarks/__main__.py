"""`python -m benchmarks [--only NAME] [--repeats N]`: run the benchmarks; write summary.json and a page with plots.

A benchmark is a module of this package that holds either `BENCHMARK`, two sides that take turns, or a function
`measure(directory, repeats)` that returns its figures by name.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.figure import Figure

NAMES = (
    "rollout_vs_raw_vllm",
    "learner_vs_torch",
    "learner_vs_padded",
    "publish",
    "async_speedup",
    "coordinator_scale",
    "episodes",
    "vs_trl",
    "step_vs_parts",
    "sandbox",
    "first_token",
    "plan_memory",
)
"""Modules of this package, in the order in which they run; most are named like the figure they give."""
RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME",
                        help="run this one (may be given several times) and keep the other figures as they are; one of "
                             f"{', '.join(NAMES)}")
    parser.add_argument("--repeats", type=int, default=9, metavar="N",
                        help="times each benchmark is repeated (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                        help="where summary.json and index.html are written (default: benchmarks/results)")
    parsed = parser.parse_args()
    if parsed.repeats < 1:
        parser.error(f"--repeats {parsed.repeats}: at least one is needed")
    return parsed


def one_thread_on_cpu() -> None:
    """Set the environment that all sides inherit: a generator's with one thread, and no accelerator."""
    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.cluster.worker_environment import accelerator_environment
    from rlhf_ray.config.generation import GenerationConfig
    from rlhf_ray.roles.engines.vllm_adapter import generator_environment

    quiet_libraries()
    os.environ.update(generator_environment(GenerationConfig(engine="in_process", threads=1)))
    os.environ.update(accelerator_environment(gpus=0), CUDA_VISIBLE_DEVICES="")


def prepare(directory: Path) -> None:
    """Make the workload in a separate process, so that this one stays small."""
    from benchmarks.workload import make_model

    process = multiprocessing.get_context("spawn").Process(target=make_model, args=(directory,), daemon=True)
    process.start()
    process.join(300)
    if process.exitcode != 0:
        process.kill()
        sys.exit(f"making the workload's model ended with {process.exitcode}; see the message above")


def measure(name: str, directory: Path, repeats: int) -> dict[str, Figure]:
    """The figures of one benchmark."""
    from benchmarks.comparison import compare

    module = import_module(f"benchmarks.{name}")
    if hasattr(module, "BENCHMARK"):
        return {name: compare(name, module.BENCHMARK, directory, repeats)}
    figures: dict[str, Figure] = module.measure(directory, repeats)
    return figures


def attempt(name: str, directory: Path, repeats: int) -> dict[str, Figure] | str:
    """The figures of one benchmark, or the message of its failure, so that the others can run."""
    from benchmarks.comparison import DifferentWork
    from benchmarks.side_process import SideFailed
    from rlhf_ray.errors import RLHFError

    try:
        return measure(name, directory, repeats)
    except (DifferentWork, SideFailed, RLHFError) as error:
        print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Run the benchmarks, and write the results after each."""
    options = arguments()
    one_thread_on_cpu()
    from benchmarks.machine import describe_machine
    from benchmarks.page import write_page
    from benchmarks.summary import RunFacts, read_summary
    from benchmarks.terminal import benchmark_progress, print_table, print_times

    run, summary = RunFacts.now(describe_machine()), read_summary(options.results)
    plan = [name for name in NAMES if name in (options.only or NAMES)]
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-benchmarks-") as temporary:
        prepare(Path(temporary))
        for name in plan:
            began = time.perf_counter()
            with benchmark_progress(name, plan, summary.seconds):
                outcome = attempt(name, Path(temporary), options.repeats)
            if isinstance(outcome, str):
                summary.failed[name] = outcome
            else:
                summary.add(name, outcome, time.perf_counter() - began, run)
                figures |= outcome
            written = [summary.write(options.results, run), write_page(summary, run, options.results)]
    print_table(figures, run.machine)
    failed = [name for name in plan if name in summary.failed]
    print_times({name: summary.seconds[name] for name in plan if name not in failed})
    print(f"written: {', '.join(map(str, written))}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see the messages above")


if __name__ == "__main__":
    main()
