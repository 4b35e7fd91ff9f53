"""`python -m chaos [--hours H] [--seed N] [--only KIND]`: inject faults into real runs, and check that they recover.

Exit code 1: a fault was not survived or not injected, or an invariant does not hold.
"""

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    from chaos.kinds import KINDS
    from chaos.plan import USUAL_MINUTES

    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--minutes", type=float, default=USUAL_MINUTES, metavar="M",
                          help="approximate duration on two cores; a shorter one than a round's %(default)g means "
                               "fewer faults (default: one round)")
    duration.add_argument("--hours", type=float, metavar="H", help="repeat rounds, each with a seed of its own")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the faults and their times (default: random)")
    parser.add_argument("--only", action="append", choices=tuple(KINDS), metavar="KIND", default=[],
                        help="inject only faults of this kind (may be given several times); one of " + ", ".join(KINDS))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                        help="where summary.json and index.html are written (default: chaos/results)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the runs and the drivers' output to this folder")
    parsed = parser.parse_args()
    if parsed.hours is not None:
        parsed.minutes = 60 * parsed.hours
    if parsed.minutes <= 0:
        parser.error(f"--{'minutes' if parsed.hours is None else 'hours'}: must be more than 0")
    if parsed.seed is None:
        parsed.seed = secrets.randbelow(100_000)
    return parsed


def main() -> None:
    """Make the runs. The results are written after each; an interrupted campaign reports those it has."""
    from chaos.kinds import needs_private_network
    from chaos.mounts import mount_private_shared_memory
    from chaos.networks import use_private_network

    options = arguments()
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    print(f"chaos: seed {options.seed}", file=sys.stderr, flush=True)
    mount_private_shared_memory()
    if needs_private_network(options.only):
        use_private_network()
    root = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # a short path: Ray's sockets are below it
    _redirect_temporary_files(root)
    try:
        sound = _run(options, root / "runs")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(0 if sound else 1)


def _exit_on_sigterm(*_: object) -> None:
    """Raise SystemExit, and ignore a second SIGTERM: `timeout` sends it twice, to the process and to its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _run(options: argparse.Namespace, directory: Path) -> bool:
    from benchmarks.machine import describe_machine
    from benchmarks.summary import commit
    from chaos.campaign import rounds
    from chaos.kinds import KINDS, not_possible
    from chaos.page import write_page, write_picture
    from chaos.plan import USUAL_MINUTES
    from chaos.summary import CampaignSummary, print_report
    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.cluster.worker_environment import accelerator_environment

    quiet_libraries()
    os.environ.update(accelerator_environment(gpus=0), CUDA_VISIBLE_DEVICES="")
    command = " ".join([f"python -m chaos --seed {options.seed}",
                        *([f"--minutes {options.minutes:g}"] if options.minutes != USUAL_MINUTES else []),
                        *(f"--only {kind}" for kind in options.only)])
    campaign = CampaignSummary(options.seed, command, describe_machine(), commit(),
                               not_tried=not_possible(options.only or KINDS))
    written: list[Path] = []
    interrupted = False
    try:
        for finished in rounds(options.seed, options.minutes, options.only, directory, campaign.not_tried):
            campaign.runs.append(finished)
            if options.keep is not None:
                shutil.copytree(directory, options.keep, dirs_exist_ok=True)
                shutil.copytree(finished.record.journals.parent, options.keep / "journals", dirs_exist_ok=True)
            written = [campaign.write(options.results), write_page(campaign, options.results),
                       write_picture(campaign, options.results)]
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
        print("chaos: interrupted", file=sys.stderr, flush=True)
    if written:
        print_report(campaign)
        print(f"written: {', '.join(map(str, written))}")
    return campaign.sound and not interrupted


def _redirect_temporary_files(root: Path) -> None:
    """Put temporary files of the runs and of Ray below `root`, which is removed at the end."""
    for variable, name in (("TMPDIR", "tmp"), ("RAY_TMPDIR", "ray")):
        (root / name).mkdir()
        os.environ[variable] = str(root / name)
    tempfile.tempdir = None


if __name__ == "__main__":
    main()
