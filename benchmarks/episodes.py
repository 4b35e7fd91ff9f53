"""Episodes of eight turns: what a turn costs beside the engine, tokens a second, a thousand of them open in one runner,
what a publication makes the engine read again, and how driver and runner grow to ten thousand.

Each part runs in processes of its own, one vLLM in each: `episode_engine`, `open_episodes`, `episode_growth`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.figure import Figure
from benchmarks.side_process import SideFailed, run_in_process

TIMEOUT_S = 900.0
GROWTH = (100, 1000, 10_000)
ENGINE = "the engine alone, same requests"


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """All figures of episodes.

    Raises:
        SideFailed: a part failed or hung; quotes the end of what it printed.
    """
    from benchmarks.episode_engine import make_model

    model = run_in_process(make_model, directory / "episodes")
    cold, warm = (part("episode_engine", directory, model, cache, repeats=repeats) for cache in ("off", "on"))
    opened = part("open_episodes", directory, model)
    grown = [part("episode_growth", directory, model, open=number) for number in GROWTH]
    return {**of_turns(warm, cold), **of_open(opened), **of_growth(grown)}


def part(module: str, directory: Path, model: Path, *words: str, **options: Any) -> Any:
    """What a module of this package writes."""
    out = directory / f"{module}.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", str(model), *words, str(out)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
                               env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    except subprocess.TimeoutExpired:
        raise SideFailed(f"{module} was not done in {TIMEOUT_S:g} s") from None
    if ended.returncode:
        raise SideFailed(f"{module} failed:\n{ended.stderr[-2000:]}")
    return json.loads(out.read_text())


def of_turns(warm: Mapping[str, Any], cold: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures of one engine with a prefix cache, beside one without."""
    cached, uncached, published = warm["rate"], cold["rate"], warm["publication"]
    return {
        "episode_turn": ratio(warm["turn"], "episode_ms", "engine_ms", "lower", 1.1, "a turn of one episode", ENGINE,
                              "ms", {"added_ms": median(t["episode_ms"] - t["engine_ms"] for t in warm["turn"]),
                                     "outside_of_the_engine_ms":
                                         median(t["episode_ms"] - t["within_ms"] for t in warm["turn"])}),
        "episodes_per_single": ratio(
            cached, "episodes", "single", "higher", 0.9, "episodes of eight turns, prefix cache",
            "single responses as long", "tokens/s",
            {**cached[-1], "without_cache": median(each["episodes"] / each["single"] for each in uncached)}),
        "publication_prefill": ratio(
            published, "cold_ms", "first_ms", "lower", 1.2, "open episodes, read again after a publication",
            "the same, read first", "ms", dict(published[-1])),
    }


def of_open(rows: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Figures of many open episodes."""
    most = max(row["open"] for row in rows)
    full = [row for row in rows if row["open"] == most]
    fewest = next(row for row in rows if row["open"] < most)
    totals = [row["runner_mb"] + row["hosts_mb"] for row in full]
    warm = totals[min(1, len(totals) - 1)]  # ended episodes leave the allocator with more memory than open ones take
    each_kb = 1024 * (totals[0] - fewest["runner_mb"] - fewest["hosts_mb"]) / (most - fewest["open"])
    return {
        "open_episodes_growth": Figure(
            totals[-1] / warm, [total / warm for total in totals[1:]], "lower", 1.05,
            f"{most} open episodes, last round", "the second round", totals[-1], warm, "MB",
            more={"kb_per_episode": each_kb, "rows": list(rows)}),
        "open_episodes_cpu": Figure(
            median(row["cpu_waiting"] for row in full), [row["cpu_waiting"] for row in full], "lower", 0.05,
            f"{most} open episodes that wait", unit="cores"),
    }


def of_growth(rows: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Figures of the growth to the most open episodes, from a tenth of them."""
    tenth, most = rows[-2:]
    more = {"rows": list(rows)}

    def grown(name: str, ours_is: str, unit: str) -> Figure:
        return Figure(most[name] / tenth[name], [most[name] / tenth[name]], "lower", 1.25,
                      f"{ours_is}, {most['open']:,} open", f"{tenth['open']:,} open", most[name], tenth[name], unit,
                      more=more)

    return {"episodes_growth_driver": grown("driver_ms_per_sample", "the driver's sample", "ms"),
            "episodes_growth_runner": grown("runner_ms_per_turn", "the runner's turn", "ms")}


def ratio(rows: Sequence[Mapping[str, float]], ours: str, theirs: str, better: Literal["higher", "lower"], goal: float,
          ours_is: str, theirs_is: str, unit: str, more: dict[str, Any]) -> Figure:
    """Of two numbers of each row."""
    ratios = [row[ours] / row[theirs] for row in rows]
    return Figure(median(ratios), ratios, better, goal, ours_is, theirs_is, median(row[ours] for row in rows),
                  median(row[theirs] for row in rows), unit, more=more)
