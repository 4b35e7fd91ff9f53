"""How what the driver and a runner do grows with the number of open episodes, in virtual time.

`python -m benchmarks.episode_growth MODEL OUT --open 1000` makes two runs in this process, both with so many open
episodes of eight turns: the real coordinator over stand-ins for all workers, and the real runner over stand-ins for
environments and generators.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from benchmarks.coordinator_groups import LocalGroup
from benchmarks.coordinator_run import configuration, resident_bytes, role_groups_of, run_coordinator
from benchmarks.coordinator_scale import of_samples
from benchmarks.coordinator_stubs import CHUNK, GENERATE_S, StubRoles, draw
from benchmarks.episode_world import ANSWER, TURNS
from benchmarks.open_episodes import SAMPLED, WORLD, prompts_of, runner_of, stop_token
from benchmarks.virtual_time import run_in_virtual_time
from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.environments.protocol import Reply, Start, Step
from rlhf_ray.observability.spans import StepClock
from rlhf_ray.records import Episode, Experience, ExperienceSummary, Rollout, SampleKey
from rlhf_ray.roles.engines.interface import Completion
from rlhf_ray.roles.episode_numbers import episode_numbers
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.workers.role_groups import RoleGroups

RUNNERS = 4
STEPS = 4
STEP_S = 0.5
"""Mean time of an environment's answer."""


class PlayingRoles(StubRoles):
    """Stand-ins of a run whose samples are episodes."""

    async def play(self, rank: int, prompts: Any, keys: list[SampleKey], *rest: Any, **named: Any) -> Rollout:
        """A chunk of episodes; any number of them side by side."""
        await asyncio.sleep(TURNS * draw(self._random, GENERATE_S))
        episodes = [Episode("talk", "completed", events={"tool_calls": TURNS}) for _ in keys]
        versions = np.where(self._rollout.response_mask, self._versions[0], -1).astype(np.int32)
        return replace(self._rollout, keys=keys, versions=versions, episodes=episodes)

    def _assembled(self, rollout: Rollout) -> tuple[Experience, ExperienceSummary]:
        experience, summary = super()._assembled(rollout)
        summary.episodes.update(episode_numbers(rollout.episodes))
        return experience, summary


async def driver(config: PPOConfig) -> dict[str, Any]:
    """The coordinator's run."""
    clock = asyncio.get_running_loop().time
    stub = PlayingRoles(config.run.seed, clock)
    groups = role_groups_of(lambda role, workers: LocalGroup(role, workers, stub.answer), 1, StepClock(clock))
    runners = LocalGroup("episode_runner", RUNNERS, stub.answer)
    roles = RoleGroups({"episode_runner": cast(Any, runners), **groups.by_section}, health=groups.health)
    return await run_coordinator(config, roles, LocalGroup("prompt_reader", 1, stub.answer), live=False)


def driver_numbers(number: int, directory: Path) -> dict[str, float]:
    """Of a run with so many open episodes: CPU milliseconds of the driver and bytes that it fetches, a sample."""
    batch = max(CHUNK, number // 2 // CHUNK * CHUNK)
    plain = configuration(directory / "run", 1, STEPS * batch, batch, local=True).model_dump(exclude_unset=True)
    given = {**plain, "rewards": {"main": {"type": "environment"}},
             "environments": {"talk": {"path": f"{WORLD}:Talk", "max_tokens": 2048, "concurrency": number}},
             "coordinator": {"prompts_per_step": batch, "max_staleness": 1, "concurrency": number}}
    config = resolve(PPOConfig.model_validate(given))
    found = run_in_virtual_time(driver(config), computing_counts=True)
    return {"driver_ms_per_sample": of_samples(found["marks"], "cpu_seconds", 1e3),
            "driver_bytes_per_sample": of_samples(found["marks"], "received_bytes"),
            "samples": found["marks"][-1]["samples"]}


class StubPool:
    """A pool of environments in this process, which answer after a while."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def open(self, row: dict[str, Any], seed: int, *rest: Any, **named: Any) -> Any:
        """As `EnvironmentPool.open`."""
        await asyncio.sleep(draw(self._random, STEP_S))
        return StubEnvironment(self._random, [{"role": "user", "content": row["prompt"]}])


class StubEnvironment:
    """As `environment_world.Talk` in an `OpenEnvironment`."""

    interrupted = 0
    observation = ""
    snapshot = None

    def __init__(self, random: Random, messages: list[dict[str, Any]]) -> None:
        self.start = Start(messages=messages, tools=[])
        self._random = random
        self._turn = 0

    async def step(self, reply: Reply) -> Step:
        """The same answer every time."""
        await asyncio.sleep(draw(self._random, STEP_S))
        self._turn += 1
        return Step([{"role": "user", "content": ANSWER}], reward=0.5, done=self._turn >= TURNS)

    async def reward(self) -> float:
        """None of its own."""
        return 0.0

    async def close(self) -> None:
        """Nothing is open."""


class StubGenerators:
    """Answer after a while."""

    def __init__(self, random: Random, stop: int) -> None:
        self._random = random
        tokens = np.full(SAMPLED, 140, np.int32)
        tokens[-1] = stop
        self._answer = Completion(tokens, np.zeros(SAMPLED, np.float32), np.zeros(SAMPLED, np.int32), "stop")

    async def call(self, method: Any, *args: Any, work: int = 1, sticky: Hashable = None, **named: Any
                   ) -> list[Completion]:
        """As `episode_runner.Generators.call`."""
        await asyncio.sleep(draw(self._random, GENERATE_S))
        return [self._answer] * len(args[0])


async def started(runner: EpisodeRunner) -> None:
    """Its tokenizer is loaded; of its environments none is left."""
    await runner.start()
    await runner.stop()


async def played(runner: EpisodeRunner, number: int) -> dict[str, float]:
    """One runner's episodes, all open at the same time."""
    prompts = prompts_of(number)
    before = resident_bytes()
    most = before
    began = time.process_time()
    playing = [asyncio.ensure_future(runner.play(prompts, [SampleKey(0, row, 0) for row in rows], 0))
               for rows in np.array_split(np.arange(number), -(-number // CHUNK))]
    while not all(each.done() for each in playing):
        await asyncio.sleep(GENERATE_S)
        most = max(most, resident_bytes())
    cpu_s = time.process_time() - began
    causes = {episode.cause for each in playing for episode in each.result().episodes or []}
    assert causes == {"completed"}, causes
    return {"runner_ms_per_turn": 1e3 * cpu_s / (number * TURNS), "runner_bytes_per_episode": (most - before) / number}


def runner_numbers(model: Path, number: int) -> dict[str, float]:
    """Of a runner with so many open episodes: CPU milliseconds a turn, and memory an episode."""
    random = Random(0)
    runner = runner_of(model, StubGenerators(random, stop_token(model)), number)
    asyncio.run(started(runner))  # in real time: environments are loaded in a process
    runner._pools = dict.fromkeys(runner._pools, cast(Any, StubPool(random)))
    return run_in_virtual_time(played(runner, number))


def main() -> None:
    """Write the numbers for one number of open episodes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episode_growth", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--open", type=int, default=1000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="episodes-") as directory:
        found = {"open": asked.open, **driver_numbers(asked.open, Path(directory)),
                 **runner_numbers(asked.model, asked.open)}
    asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
