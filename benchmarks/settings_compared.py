"""`python -m benchmarks.settings_compared stale | dynamic`: settings of the algorithm side by side, with seeds and a
control, on tasks that the examples learn. Finished runs are kept, so the command can be repeated until all are there.

stale: rollouts that run two versions ahead, on the quickstart's task: PPO as it is, CISPO, and importance weights with
a band or a mask of geometric means, beside PPO without staleness.
dynamic: GRPO on the arithmetic example with dynamic sampling, and without. What counts is the held-out accuracy over
the samples that were generated, filtered ones included.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.estimators.outcome import Outcome, read_outcome, spread
from benchmarks.estimators.runs import models_of, run_unless_finished
from benchmarks.machine import describe_machine
from rlhf_ray.cli.library_logging import quiet_libraries
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.load import resolve
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.observability.metrics import read_metrics
from rlhf_ray.stages import arithmetic_example, quickstart, sft
from rlhf_ray.stages.bundled_recipes import Recipe, run_once

HOME = Path("runs/settings_compared")
QUIET = ("--checkpoint.every=0", "--checkpoint.every_minutes=0", "--logging.tensorboard=false",
         "--logging.samples=off")
STALE = ("--coordinator.max_staleness=2", "--run.steps=24")
WEIGHTED = (*STALE, "--algorithm.old_logprobs=policy")
STALE_ARMS = {
    "PPO, no staleness": ("--run.steps=24",),
    "PPO, weights truncated at 2": (*WEIGHTED, "--algorithm.importance.tokens=truncate"),
    "PPO, no weights": (*WEIGHTED, "--algorithm.importance.tokens=none"),
    "PPO, weights in a band": (*WEIGHTED, "--algorithm.importance.tokens=band"),
    "PPO, geometric mask": (*WEIGHTED, "--algorithm.importance.tokens=truncate",
                            "--algorithm.importance.masks=[geometric]"),
    "CISPO": (*STALE, "--algorithm.loss=cispo"),
}
DYNAMIC_ARMS = {"without": (), "dynamic sampling": ("--algorithm.dynamic_sampling=true",)}
EVALUATED = ("--evaluation.every=4",)


def config_of(recipe: Recipe, models: Path, seed: int, directory: Path, settings: Sequence[str],
              file: str) -> PPOConfig:
    """The whole configuration of one run of an example's recipe with other settings."""
    return resolve(recipe.config("ppo", models, seed, [f"--run.dir={directory}", *QUIET, *settings], file=file))


def stale(seeds: Sequence[int], home: Path, models: Path | None) -> str:
    """Runs that are missing, and a table of all."""
    found = models_of(models, home)
    rows = []
    for name, settings in STALE_ARMS.items():
        outcomes: list[Outcome] = []
        staleness: list[float] = []
        for seed in seeds:
            directory = home / _folder(name) / f"seed_{seed}"
            run_unless_finished(config_of(quickstart.RECIPE, found, seed, directory, settings, "ppo"))
            outcomes.append(read_outcome(name, seed, directory))
            staleness += [row["staleness/mean"] for row in read_metrics(directory) if "staleness/mean" in row]
        numbers = [spread(outcomes, number) for number in (
            lambda o: o.gold_after, lambda o: o.kl_after, lambda o: o.samples[-1] / o.seconds)]
        cells = [f"{number.mean:.{digits}f} ± {number.deviation:.{digits}f}"
                 for number, digits in zip(numbers, (3, 2, 1), strict=True)]
        rows.append([name, f"{mean(staleness):.2f}", *cells])
    return table(("arm", "staleness, mean", "gold after", "KL after", "samples/s of the loop"), rows)


@dataclass(frozen=True)
class Point:
    """A run at one of its evaluations."""

    step: int
    accuracy: float
    """Of held-out sums."""
    generated: int
    """Samples so far, those that were filtered included."""
    seconds: float
    """Of the steps so far."""


def points(directory: Path, samples_per_step: int, samples_per_prompt: int) -> list[Point]:
    """The evaluations of a finished run."""
    found, generated, seconds = [], 0.0, 0.0
    for row in read_metrics(directory):
        if "reward/mean" in row:
            generated += samples_per_step + samples_per_prompt * row.get("dynamic/filtered", 0.0)
            seconds += row["time/step"]
        if "eval/reward" in row:
            found.append(Point(row["step"], row["eval/reward"], round(generated), seconds))
    return found


def dynamic(seeds: Sequence[int], home: Path) -> str:
    """Runs that are missing; the accuracy at each evaluation, and where it reaches what the control ends with."""
    recipe = arithmetic_example.RECIPE
    home.mkdir(parents=True, exist_ok=True)
    arithmetic_example.make_data(home, 0)
    run_once("sft", lambda: sft.run(recipe.config("sft", home, 0), True), home / "sft")
    curves: dict[tuple[str, int], list[Point]] = {}
    for seed in seeds:
        for name, settings in DYNAMIC_ARMS.items():
            directory = home / _folder(name) / f"seed_{seed}"
            config = config_of(recipe, home, seed, directory, [*EVALUATED, *settings], "grpo")
            run_unless_finished(config)
            curves[name, seed] = points(directory, config.coordinator.samples_per_step,
                                        config.coordinator.samples_per_prompt)
    rows = [[name, str(seed), str(p.step), f"{p.accuracy:.1%}", f"{p.generated:,}", f"{p.seconds:.0f}"]
            for (name, seed), curve in curves.items() for p in curve]
    ends = "samples generated", "seconds of steps"
    return "\n\n".join([table(("arm", "seed", "step", "held-out accuracy", *ends), rows),
                        table(("seed", "accuracy", "arm", "step", *ends), reached(seeds, curves))])


def reached(seeds: Sequence[int], curves: Mapping[tuple[str, int], Sequence[Point]]) -> list[list[str]]:
    """For each seed, the first evaluation of each arm with at least the lower of their last accuracies."""
    rows = []
    for seed in seeds:
        goal = min(curves[name, seed][-1].accuracy for name in DYNAMIC_ARMS)
        for name in DYNAMIC_ARMS:
            p = next(p for p in curves[name, seed] if p.accuracy >= goal)
            rows.append([str(seed), f"{goal:.1%}", name, str(p.step), f"{p.generated:,}", f"{p.seconds:.0f}"])
    return rows


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def main() -> None:
    """Make the runs that are missing, and print and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.settings_compared", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("stale", "dynamic"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--models", type=Path, metavar="DIR",
                        help="of stale: a finished quickstart, whose models are taken")
    parser.add_argument("--dir", type=Path, default=HOME, metavar="DIR", help="default: %(default)s")
    asked = parser.parse_args()
    quiet_libraries()
    home = asked.dir / asked.which
    with ray_session(ClusterConfig(dashboard=False), {"default": PoolConfig(cpus=2)}, "settings-compared"):
        text = stale(asked.seeds, home, asked.models) if asked.which == "stale" else dynamic(asked.seeds, home)
    text += f"\n\n{json.dumps(describe_machine())}\n"
    (home / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
