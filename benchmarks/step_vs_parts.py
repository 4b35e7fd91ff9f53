"""How near the loop comes to its parts: samples a second of `rlhf-ray ppo`, over what the passes of a step alone allow.

The passes of a step of the quickstart, each bare, on the same two cores and with as many tokens as the loop's steps:

- generation: two engines of vLLM, one thread each, with half of the samples each;
- four forward passes: log-probabilities of the policy and of the reference, values and rewards, on both cores at once;
- updates: the policy's and the critic's at the same time, one thread each.

The passes take turns with the loop. The list is fixed: a pass that the loop saves still counts among its parts, so
saving it raises the figure, and `seconds_of_saved_passes` is its part. (The quickstart saves the policy's own
log-probabilities: `algorithm.old_logprobs: generator`.)
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.figure import Figure
from benchmarks.learner_side import ALGORITHM, ROWS
from benchmarks.learner_vs_torch import BareTorchSide
from benchmarks.rollout_vs_raw_vllm import RawVLLMSide
from benchmarks.side_process import SideProcess, Turn, run_in_process
from benchmarks.trl.start_models import models
from benchmarks.vs_trl import OURS_IS, TURNS, UPDATES_A_TURN, our_config, our_run
from rlhf_ray.observability.metrics import read_metrics

GOAL = 0.85
CORES = 2
FORWARDS = 4
"""Passes of a step: log-probabilities of policy and reference, values, rewards."""
REPEATS = 3
"""Of the bare passes in each turn."""


class PolicyForwards(BareTorchSide):
    """Log-probabilities of the policy and of the reference."""

    @torch.no_grad()
    def run(self) -> float:
        """Two passes over all rows, a mini-batch at a time; returns their tokens."""
        for _ in range(2):
            for rows in np.array_split(np.arange(ROWS), ALGORITHM.mini_batches):
                self.logprobs(rows)
        return 2 * float(self.lengths.sum())

    def proof(self) -> list[float]:
        """Nothing is compared."""
        return []


class CriticUpdate(BareTorchSide):
    """Updates of a critic of the policy's shape, by the squared error."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1, bias=False)

    def values(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of the states before the rows' response tokens, and those tokens' numbers in the whole batch."""
        states, chosen = self.states(rows)
        return self.head(states)[:, 0], chosen

    def loss(self, rows: np.ndarray) -> Tensor:
        """Half the mean squared error of a mini-batch."""
        values, chosen = self.values(rows)
        return 0.5 * (values - self.advantages[chosen]).square().mean()


class ScalarForwards(CriticUpdate):
    """Values and rewards."""

    @torch.no_grad()
    def run(self) -> float:
        """As `PolicyForwards.run`."""
        for _ in range(2):
            for rows in np.array_split(np.arange(ROWS), ALGORITHM.mini_batches):
                self.values(rows)
        return 2 * float(self.lengths.sum())


PARTS = {
    "generation": (partial(RawVLLMSide, samples=ROWS // CORES),) * CORES,
    "forwards": (PolicyForwards, ScalarForwards),
    "updates": (BareTorchSide, CriticUpdate),
}
"""The two processes of each phase; amounts are response tokens in the first, all tokens in the others."""


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """`step_vs_parts`, over at most five turns.

    Raises:
        SideFailed: a run or a part failed.
    """
    turns = min(repeats, TURNS)
    config = our_config(run_in_process(models).absolute(), directory / "loop", 1 + turns * UPDATES_A_TURN)
    steps: list[float] = []
    costs: list[dict[str, float]] = []
    with our_run(config, directory) as ours, ExitStack() as stack:
        parts = {phase: [stack.enter_context(SideProcess(f"{phase} {i}", build, directory))
                         for i, build in enumerate(builds)] for phase, builds in PARTS.items()}
        token_costs(parts)  # warms up
        for number in range(turns):
            steps.append(median(ours.turn(UPDATES_A_TURN)[1:]))
            costs.append(token_costs(parts))
            print(f"turn {number + 1}: {steps[-1]:.2f} s a step", file=sys.stderr, flush=True)
        ours.finish()
    rows, epochs = read_metrics(directory / "loop"), config.algorithm.epochs
    of_turns = [rows[first:last] for first, last in pairwise(range(1, len(rows) + 1, UPDATES_A_TURN))]
    allowed = [seconds_of_parts(cost, tokens_a_step(turn, config.coordinator.samples_per_step), epochs)
               for cost, turn in zip(costs, of_turns, strict=True)]
    limits = [sum(part.values()) for part in allowed]
    ratios = [limit / step for limit, step in zip(limits, steps, strict=True)]
    samples = config.coordinator.samples_per_step
    saved = 1 / FORWARDS if config.algorithm.old_logprobs == "generator" else 0.0
    return {"step_vs_parts": Figure(
        value=median(ratios), repeats=ratios, better="higher", goal=GOAL, ours_is=OURS_IS,
        theirs_is="the bare passes of its step (vLLM, torch)", ours=samples / median(steps),
        theirs=samples / median(limits), unit="samples/s", more={
            "seconds_a_step": median(steps),
            "seconds_of_parts": {phase: median(part[phase] for part in allowed) for phase in PARTS},
            "seconds_of_saved_passes": saved * median(part["forwards"] for part in allowed),
            "seconds_of_phases": phases(rows[1:])})}


def token_costs(parts: dict[str, list[SideProcess]]) -> dict[str, float]:
    """Seconds for each token of a phase, its two processes at work at the same time.

    Generation and updates last as long as the slower process. Forward passes could be divided otherwise: their time on
    both cores is added up and halved.
    """
    costs = {}
    with ThreadPoolExecutor(CORES) as pool:
        for phase, sides in parts.items():
            found = [_phase_cost(phase, list(pool.map(SideProcess.turn, sides))) for _ in range(REPEATS)]
            costs[phase] = median(found)
    return costs


def _phase_cost(phase: str, turns: Sequence[Turn]) -> float:
    if phase == "generation":
        return max(turn.seconds for turn in turns) / sum(turn.amount for turn in turns)
    if phase == "forwards":  # each process makes two of the four passes
        return sum(FORWARDS / CORES * turn.seconds / turn.amount for turn in turns) / CORES
    return max(turn.seconds / turn.amount for turn in turns)


def tokens_a_step(rows: Sequence[dict[str, Any]], samples: int) -> tuple[float, float]:
    """Mean number of response tokens, and of all tokens, of some steps."""
    return (mean(row["response/length"] for row in rows) * samples,
            mean(row["throughput/tokens_per_second"] * row["time/step"] for row in rows))


def seconds_of_parts(costs: dict[str, float], tokens: tuple[float, float], epochs: int) -> dict[str, float]:
    """Seconds of each phase of a step with so many response tokens, and tokens in all."""
    responses, whole = tokens
    return {"generation": costs["generation"] * responses, "forwards": costs["forwards"] * whole,
            "updates": costs["updates"] * whole * epochs}


def phases(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step in which a worker was in each phase, by the run's own metrics; phases overlap."""
    names = [name for name in rows[0] if name.startswith("time/")]
    return {name.removeprefix("time/"): median(row[name] for row in rows) for name in names}
