"""What the sandbox costs over a bare interpreter: the time of an empty program in it and of `python -c pass`, in turns;
and how many programs a second two workers run."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.figure import Figure
from rlhf_ray.user_code.process import PrintedLines
from rlhf_ray.user_code.sandbox import Job, Limits, SandboxPool

PROGRAMS = 40
"""Of each repeat."""
WORKERS = 2
GOAL = 3.0


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """The ratio of both times, with the programs a second of `WORKERS` in `more`."""
    turns = asyncio.run(_turns(repeats))
    inside, bare, rates = (list(column) for column in zip(*turns, strict=True))
    ratios = [a / b for a, b in zip(inside, bare, strict=True)]
    return {"sandbox_start": Figure(
        median(ratios), ratios, "lower", GOAL, ours_is="an empty program in the sandbox", theirs_is="python -c pass",
        ours=median(inside), theirs=median(bare), unit="s",
        more={"programs_per_second": median(rates), "workers": WORKERS})}


async def _turns(repeats: int) -> list[tuple[float, float, float]]:
    """(seconds of a program inside, seconds of a bare one, programs a second) of each repeat."""
    found = []
    async with SandboxPool("a benchmark", Limits(), WORKERS, PrintedLines("", "")) as pool:
        await asyncio.gather(*(pool.run(Job("pass")) for _ in range(WORKERS)))
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in range(PROGRAMS):
                await pool.run(Job("pass"))
            inside = (time.perf_counter() - began) / PROGRAMS
            began = time.perf_counter()
            for _ in range(PROGRAMS):
                subprocess.run([sys.executable, "-c", "pass"], check=True)
            bare = (time.perf_counter() - began) / PROGRAMS
            began = time.perf_counter()
            await asyncio.gather(*(pool.run(Job("pass")) for _ in range(PROGRAMS * WORKERS)))
            found.append((inside, bare, PROGRAMS * WORKERS / (time.perf_counter() - began)))
    return found
