"""Many open episodes in one runner, whose environments share two processes; a stand-in samples for them.

`python -m benchmarks.open_episodes MODEL OUT`: memory of runner and hosts at 100, 300 and 1,000 open episodes, in three
rounds, and the CPU time of all of them while every episode only waits for its generator.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.episode_world import TURNS
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.data.encoding import flat_tokens
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_runner import EpisodeRunner

SIZES, ROUNDS = (100, 300, 1000), 3
WATCHED_S = 3.0
"""How long the CPU time of waiting episodes is measured."""
SAMPLED = 16
WORLD = Path(__file__).with_name("episode_world.py")


class HeldGenerator:
    """Holds what is asked until it is released, then answers with the same tokens each time."""

    def __init__(self, stop: int) -> None:
        self.released = asyncio.Event()
        self.waiting = 0
        tokens = np.full(SAMPLED, 140, np.int32)
        tokens[-1] = stop
        self._answer = Completion(tokens, np.zeros(SAMPLED, np.float32), np.zeros(SAMPLED, np.int32), "stop")

    async def call(self, method: Any, *args: Any, work: int = 1, sticky: Hashable = None, **named: Any
                   ) -> list[Completion]:
        """As `episode_runner.Generators.call`."""
        self.waiting += 1
        await self.released.wait()
        self.waiting -= 1
        return [self._answer] * len(args[0])


def prompts_of(count: int) -> Prompts:
    """Prompts of a few words each."""
    return Prompts(offsets_of([1] * count), flat_tokens([[2]] * count), [f"question {i}" for i in range(count)],
                   [{}] * count, np.arange(count))


def runner_of(model: Path, generators: Any, concurrency: int) -> EpisodeRunner:
    """A runner with so many open episodes at most, in two processes."""
    environment = EnvironmentConfig(path=f"{WORLD}:Talk", max_turns=TURNS + 1, max_tokens=2048, concurrency=concurrency)
    sampling = SamplingConfig(max_tokens=SAMPLED)
    return EpisodeRunner({"talk": environment}, ModelConfig(path=str(model)), sampling, generators)


async def measure(model: Path, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """One row for each round and size."""
    generators = HeldGenerator(stop_token(model))
    runner = runner_of(model, generators, max(sizes))
    await runner.start()
    try:
        return [await held(runner, generators, size, number) for number in range(ROUNDS) for size in sizes]
    finally:
        await runner.stop()


async def held(runner: EpisodeRunner, generators: HeldGenerator, size: int, number: int) -> dict[str, float]:
    """Open so many, look, and let them end."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    playing = asyncio.ensure_future(
        runner.play(prompts_of(size), [SampleKey(number, row, 0) for row in range(size)], 0))
    while generators.waiting < size and not playing.done():
        await asyncio.sleep(0.05)
    opened_s = loop.time() - began
    memory = megabytes()
    before = cpu_seconds()
    await asyncio.sleep(WATCHED_S)
    busy = (cpu_seconds() - before) / WATCHED_S
    began = loop.time()
    generators.released.set()
    rollout = await playing
    generators.released.clear()
    causes = {episode.cause for episode in rollout.episodes or []}
    assert causes == {"completed"}, causes
    return {"round": number, "open": size, **memory, "cpu_waiting": busy, "opened_s": opened_s,
            "turn_ms": 1e3 * (loop.time() - began) / (TURNS * size)}


def processes() -> list[psutil.Process]:
    """This one first, then all that environments run in."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def megabytes() -> dict[str, float]:
    """Of the runner, and of all processes below it (what they share is divided among them)."""
    sizes = [process.memory_full_info().pss / 2**20 for process in processes()]
    return {"runner_mb": sizes[0], "hosts_mb": sum(sizes[1:]), "hosts": len(sizes) - 1}


def cpu_seconds() -> float:
    """Of all processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes())


def stop_token(model: Path) -> int:
    """The token that ends a turn."""
    from rlhf_ray.models.loading import load_tokenizer

    return int(load_tokenizer(ModelConfig(path=str(model))).eos_token_id)


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.open_episodes", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    asked = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    asked.out.write_text(json.dumps(asyncio.run(measure(asked.model, tuple(asked.sizes)))))


if __name__ == "__main__":
    main()
