"""`python -m chaos [--minutes 15] [--seed N] [--only KIND]`: meet faults on purpose, and see what becomes of them.

Exit code 1: a fault was not survived, never came to be injected, or an invariant does not hold.
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
    """What the command line asks for."""
    from chaos.kinds import KINDS

    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, metavar="M",
                        help="about how long it may take on two cores; in less there are fewer faults, in more there "
                             "are more rounds (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="which faults when (default: another each time)")
    parser.add_argument("--only", action="append", choices=tuple(KINDS), metavar="KIND", default=[],
                        help="faults of this kind alone (may be given several times); one of " + ", ".join(KINDS))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                        help="where summary.json and index.html are written (default: chaos/results)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the runs and the drivers' output to this folder")
    parsed = parser.parse_args()
    if parsed.minutes <= 0:
        parser.error(f"--minutes {parsed.minutes}: must be more than 0")
    if parsed.seed is None:
        parsed.seed = secrets.randbelow(100_000)
    return parsed


def main() -> None:
    """Make the runs; after each the results are written, and when one is interrupted those that there are."""
    from chaos.own_memory import own_shared_memory

    asked = arguments()
    signal.signal(signal.SIGTERM, _end_as_ctrl_c_does)
    print(f"chaos: seed {asked.seed}", file=sys.stderr, flush=True)
    own_shared_memory()
    root = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # a short name: Ray's sockets lie below it
    _own_places(root)
    try:
        sound = _run(asked, root / "runs")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(0 if sound else 1)


def _end_as_ctrl_c_does(*_: object) -> None:
    """Tidy up, write results, then end. `timeout` sends SIGTERM twice, to the process and to its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _run(asked: argparse.Namespace, place: Path) -> bool:
    from benchmarks.machine import describe_machine
    from benchmarks.summary import commit
    from chaos.campaign import rounds
    from chaos.page import write_page
    from chaos.picture import write_picture
    from chaos.report import print_report
    from chaos.summary import Chaos
    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.engine.distributed import accelerator_environment

    quiet_libraries()
    os.environ.update(accelerator_environment(gpus=0), CUDA_VISIBLE_DEVICES="")
    command = " ".join(["python -m chaos", *sys.argv[1:]])
    chaos = Chaos(asked.seed, command, describe_machine(), commit())
    written: list[Path] = []
    interrupted = False
    try:
        for finished in rounds(asked.seed, asked.minutes, asked.only, place):
            chaos.runs.append(finished)
            if asked.keep is not None:
                shutil.copytree(place, asked.keep, dirs_exist_ok=True)
            written = [chaos.write(asked.results), write_page(chaos, asked.results),
                       write_picture(chaos, asked.results)]
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
        print("chaos: interrupted", file=sys.stderr, flush=True)
    if written:
        print_report(chaos)
        print(f"written: {', '.join(map(str, written))}")
    return chaos.sound and not interrupted


def _own_places(root: Path) -> None:
    """Temporary files of the runs and Ray's lie where they are found again, and removed."""
    for variable, name in (("TMPDIR", "tmp"), ("RAY_TMPDIR", "ray")):
        (root / name).mkdir()
        os.environ[variable] = str(root / name)
    tempfile.tempdir = None


if __name__ == "__main__":
    main()
