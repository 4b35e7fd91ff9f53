"""What overlap gains: the same run with η = 1 and with η = 0, generation and learning on one core each.

Synchronous PPO keeps one side waiting while the other works; with both equally long, overlap could double the speed.
What remains below that is what cannot be hidden: forward passes of the learner before each update, the publication, and
handing over. Epochs and mini-batches (or else how many sequences the generator decodes side by side) are chosen so that
both sides have about the same work on the machine at hand.
"""

import asyncio
import sys
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.comparison import DifferentWork
from benchmarks.figure import Figure
from benchmarks.overlap_run import Steps, overlap_run, run_config
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.stages import PPOConfig

STEPS, PAIRS = 3, 5
"""Steps of a turn that count, and most pairs of turns: five minutes are what the benchmark may take."""
BALANCED = 1.1
"""A side that works up to so many times as long as the other is balanced with it."""
MOST_EPOCHS, MINI_BATCHES = 8, (4, 8, 16)
FIXED = 1 / 6
"""Of an optimizer step on 32 rows of the workload's model, what does not depend on them (docs/benchmark_notes.md)."""
GOAL, MOST_IDLE = 1.6, 0.15


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """The figure, from up to five pairs of turns.

    Raises:
        DifferentWork: the turns did not train on the same tokens.
    """
    config = run_config(directory)
    with ray_session(config.cluster, config.pools, "overlap"):
        return {"async_speedup": asyncio.run(_measure(directory, config, min(repeats, PAIRS)))}


async def _measure(directory: Path, config: PPOConfig, pairs: int) -> Figure:
    async with overlap_run(config) as run:
        await run.turn(0, 1)  # first calls pay for what later ones find
        settings = balance(config, await run.turn(0, 2))
        if not settings:
            return await _take_turns(run, pairs)
    print(f"async_speedup: balanced by {settings}", file=sys.stderr, flush=True)
    async with overlap_run(run_config(directory, **settings)) as run:
        await run.turn(0, 1)
        return await _take_turns(run, pairs)


async def _take_turns(run: Any, pairs: int) -> Figure:
    synchronous: list[Steps] = []
    overlapped: list[Steps] = []
    for pair in range(pairs):
        order = ((0, synchronous), (1, overlapped))
        for max_staleness, turns in order if pair % 2 == 0 else order[::-1]:
            turns.append(await run.turn(max_staleness, STEPS))
    require_same_work([*synchronous, *overlapped])
    return figure(run.config, synchronous, overlapped)


def balance(config: PPOConfig, steps: Steps) -> dict[str, Any]:
    """Settings that make the work of both sides of a synchronous step about equally long; none when it is already.

    Work is the time in which a side's core is busy: that is what overlap cannot go below. Updates are as long as there
    are epochs, and longer by the fixed part of an optimizer step where the same rows make more of them.
    """
    whole, algorithm = steps.seconds("time/step"), config.algorithm
    generation, learning = (whole * (1 - steps.idle[side]) for side in ("generation", "learning"))
    if max(generation, learning) <= BALANCED * min(generation, learning):
        return {}
    forward = steps.seconds("time/logprobs")
    epoch = (learning - forward) / algorithm.epochs
    lengths = {(epochs, number): forward + epochs * epoch * (1 + FIXED * (number / algorithm.mini_batches - 1))
               for epochs in range(1, MOST_EPOCHS + 1) for number in MINI_BATCHES if number >= algorithm.mini_batches}
    epochs, number = min(lengths, key=lambda settings: abs(log(lengths[settings] / generation)))
    found: dict[str, Any] = {"algorithm": {"epochs": epochs, "mini_batches": number}}
    if lengths[epochs, number] > BALANCED * generation:
        fewer = max(4, round(config.generator.max_sequences * generation / lengths[epochs, number]))
        found["generator"] = {"max_sequences": fewer}
    return found


def require_same_work(turns: list[Steps]) -> None:
    """Raises DifferentWork unless all turns trained on the same number of tokens, to 2%."""
    tokens = [turn.tokens for turn in turns]
    if max(tokens) > 1.02 * min(tokens):
        raise DifferentWork(f"async_speedup: turns trained on {tokens} tokens and cannot be compared")


def figure(config: PPOConfig, synchronous: list[Steps], overlapped: list[Steps]) -> Figure:
    """Ratios pair by pair, and how idle each side was with overlap."""
    ratios = [mine.samples_per_second / other.samples_per_second
              for mine, other in zip(overlapped, synchronous, strict=True)]
    idle = {side: median(turn.idle[side] for turn in overlapped) for side in overlapped[0].idle}
    update = median(turn.seconds("time/policy_update") / turn.seconds("time/step") for turn in synchronous)
    return Figure(
        value=median(ratios), repeats=ratios, better="higher", goal=GOAL, ours_is="max_staleness 1",
        theirs_is="max_staleness 0", unit="samples/s", ours=median(turn.samples_per_second for turn in overlapped),
        theirs=median(turn.samples_per_second for turn in synchronous),
        more={"idle_share": idle, "idle_share_goal": MOST_IDLE, "update_share_of_a_synchronous_step": update,
              "publish_seconds": median(row["weights/publish_seconds"] for turn in overlapped for row in turn.rows),
              "staleness_max": max(row["staleness/max"] for turn in overlapped for row in turn.rows),
              "epochs": config.algorithm.epochs, "mini_batches": config.algorithm.mini_batches,
              "max_sequences": config.generator.max_sequences},
    )
