"""`launch/gpu_check [--cpu]`: run every GPU path on one GPU and print one table.

Exit codes: 0 all is right, 1 something is not, 2 there is no GPU.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_check.settings import ON_CPU, ON_GPU, Scale
from benchmarks.gpu_check.table import Row, as_text


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="launch/gpu_check", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU: the same code, a tiny model, float32")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too")
    return parser.parse_args()


async def check(scale: Scale, gpus: list[str], directory: Path) -> list[Row]:
    """All rounds; the first one measures the roles, too."""
    from benchmarks.gpu_check import measures
    from benchmarks.gpu_check.workers import make_models, pair
    from rlhf_ray.planning.hardware import gpu_of

    models, device = make_models(directory, scale), gpu_of(gpus[0]) if gpus else None
    rows: list[Row] = []
    for number, a_round in enumerate(scale.rounds(len(gpus))):
        async with pair(scale, a_round, models) as both:
            rows += await measures.publications(both, scale, a_round, version=1)
            if number == 0:
                rows += await measures.speeds(both, scale, models["policy"], device)
                rows += measures.memory(both, scale, a_round, models["policy"], device)
            rows += await measures.turns(both, scale, version=50)
    if scale.gpu and len(gpus) < 2:
        rows.append(Row("publication by nccl", "not run", "NCCL joins processes with a GPU each, and here is one"))
    return rows


def main() -> None:
    """Check, print, and say by the exit code how it went."""
    asked = arguments()
    from rlhf_ray.cli.library_logging import quiet_libraries
    from rlhf_ray.planning.local_machine import gpus_here

    gpus = [] if asked.cpu else [gpu.name for gpu in gpus_here()]
    if not gpus and not asked.cpu:
        print("gpu_check: no NVIDIA GPU here (nvidia-smi lists none); --cpu rehearses it on the CPU", file=sys.stderr)
        sys.exit(2)
    quiet_libraries()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-gpu-check-") as temporary:
        rows = asyncio.run(check(ON_CPU if asked.cpu else ON_GPU, gpus, Path(temporary)))
    where = ", ".join(gpus) or "CPU, float32 (a rehearsal)"
    text = as_text(rows, f"{where}: {time.perf_counter() - began:.0f} s")
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(1 if any(row.right is False for row in rows) else 0)


if __name__ == "__main__":
    main()
