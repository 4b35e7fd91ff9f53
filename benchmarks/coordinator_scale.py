"""The coordinator alone: 100,000 prompts through the real loop, with stand-ins for all roles.

Two kinds of runs. One makes real Ray calls to 256 generators that live in a few actors, in real time: it gives the
figures. The other has all roles inside the coordinator's process, for 1 to 256 generators, in an event loop that jumps
over waiting: it shows how the coordinator's own cost grows.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from benchmarks.figure import Figure
from benchmarks.side_process import SideFailed

PROMPTS, GENERATORS = 100_000, (1, 4, 16, 64, 256)
TIMEOUT_S = 400.0
SETTLED = 0.5
"""Share of the run after which memory must be flat: the replay buffer has been full by then."""
FLAT_BYTES = 32.0
"""Growth of resident memory, a sample, that counts as flat: 3 MB in the whole run. A sample's experience has 10,000."""


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """The promised figures, and the growth of memory. Repeats are equal parts of one run.

    Raises:
        SideFailed: a run failed, which it also does when a sample is lost or trained twice.
    """
    found = run(directory, GENERATORS[-1], "ray")
    inside = {n: run(directory, n, "local") for n in GENERATORS}
    series = {str(n): {"efficiency": efficiency(one), "cpu_ms_per_sample": of_samples(one["marks"], "cpu_seconds", 1e3)}
              for n, one in inside.items()}
    return figures(found, repeats, {"inside_one_process": series})


def figures(found: Mapping[str, Any], repeats: int, more: dict[str, Any]) -> dict[str, Figure]:
    """The figures of one run."""
    parts, growth = cut(found["marks"], repeats), memory_growth(found["marks"])
    busy = [efficiency(found, window) for window in windows(found, repeats)]
    return {
        "coordinator_efficiency_256": figure(
            busy, "higher", 0.95, "chunks that 256 generators made", "every generator always busy",
            more={**more, "whole_run": efficiency(found)}),
        "coordinator_ms_per_sample": figure(
            [of_samples(part, "cpu_seconds", 1e3) for part in parts], "lower", 0.3,
            "CPU time of the coordinator's process, all threads", unit="ms",
            value=of_samples(found["marks"], "cpu_seconds", 1e3), more=by_thread(found["marks"])),
        "coordinator_bytes_per_sample": figure(
            [of_samples(part, "carried_bytes") for part in parts], "lower", 1000,
            "what the coordinator's connections carry, both ways", unit="bytes",
            value=of_samples(found["marks"], "carried_bytes"),
            more={"fetched": of_samples(found["marks"], "received_bytes")}),
        "coordinator_memory_growth": figure(
            [growth["bytes_per_sample"]], "lower", FLAT_BYTES, "slope of resident memory", unit="bytes", more=growth),
    }


def figure(repeats: list[float], better: Literal["higher", "lower"], goal: float, ours_is: str, theirs_is: str = "",
           value: float | None = None, **more: Any) -> Figure:
    """The median over the parts; or `value`, of the whole run, where early steps pay for the work of later ones."""
    return Figure(median(repeats) if value is None else value, repeats, better, goal, ours_is, theirs_is, **more)


def run(directory: Path, generators: int, over: str) -> dict[str, Any]:
    """One run in a separate process; see `coordinator_run`.

    Raises:
        SideFailed: it failed or hung; quotes the end of what it printed.
    """
    out = directory / f"coordinator_{over}_{generators}.json"
    command = [sys.executable, "-m", "benchmarks.coordinator_run", str(out), "--over", over,
               "--generators", str(generators), "--samples", str(PROMPTS)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise SideFailed(f"the coordinator with {generators} generators ({over}) was not done in {TIMEOUT_S:g} s"
                         ) from None
    if ended.returncode:
        raise SideFailed(f"the coordinator with {generators} generators ({over}) failed:\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def efficiency(found: Mapping[str, Any], window: tuple[float, float] | None = None) -> float:
    """Share of the generators' time that they are at work, from the first chunk's start to the last one's: before and
    after that there is not enough work for all. Working without a pause is the ideal throughput."""
    begin, end = window or windows(found, 1)[0]
    spans = np.array(found["generated"])
    worked = np.minimum(spans[:, 0] + spans[:, 1], end) - np.maximum(spans[:, 0], begin)
    return float(worked.clip(0).sum() / ((end - begin) * found["generators"]))


def windows(found: Mapping[str, Any], count: int) -> list[tuple[float, float]]:
    """Equal stretches of the time from the first chunk's start to the last one's."""
    starts = [start for start, _ in found["generated"]]
    return list(pairwise(np.linspace(min(starts), max(starts), count + 1).tolist()))


def cut(marks: Sequence[Mapping[str, float]], count: int) -> list[Sequence[Mapping[str, float]]]:
    """About `count` stretches of whole steps, as equal as can be."""
    ends = sorted({round(i * (len(marks) - 1) / count) for i in range(count + 1)})
    return [marks[a : b + 1] for a, b in pairwise(ends)]


def of_samples(marks: Sequence[Mapping[str, float]], what: str, unit: float = 1.0) -> float:
    """What was used from the first mark to the last, for each sample trained between them."""
    first, last = marks[0], marks[-1]
    return unit * (last[what] - first[what]) / (last["samples"] - first["samples"])


def by_thread(marks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPU milliseconds a sample by kind of thread; see `coordinator_run.Mark`."""
    first, last = marks[0], marks[-1]
    return {f"{kind}_ms": 1e3 * (seconds - first["thread_seconds"][kind]) / (last["samples"] - first["samples"])
            for kind, seconds in last["thread_seconds"].items()}


def memory_growth(marks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Resident memory (MB) once settled and at the end, and the slope of a straight line through all between."""
    settled = [m for m in marks if m["samples"] >= SETTLED * marks[-1]["samples"]]
    slope = np.polyfit([m["samples"] for m in settled], [m["rss_bytes"] for m in settled], 1)[0]
    return {"bytes_per_sample": float(slope), "mb_settled": settled[0]["rss_bytes"] / 1e6,
            "mb_end": settled[-1]["rss_bytes"] / 1e6}
