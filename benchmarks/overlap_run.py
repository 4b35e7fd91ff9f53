"""A real PPO run on one team of workers, in turns: some steps synchronous, then some overlapped, of the same samples.

The generator and the frozen scorers share one core, the learner has the other. Every turn begins with the same prompts
and seeds, and the learning rate is too small to change what is sampled, so all turns do the same work.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.workload import SEED
from rlhf_ray.algorithms.kl import FixedKL
from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.prompt_source import PromptSource
from rlhf_ray.coordinator.state import RunState
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.team import Team
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.data.reviews import make_openings
from rlhf_ray.observability.waiting import mean_shares
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.stages.ppo_team import spawn_team, start_team
from rlhf_ray.stages.workplace import workplace

PROMPTS = 1024
GENERATION_SIDE = ("Generator", "ReferenceScorer", "RewardScorer", "Assembler")
LEARNING_SIDE = ("PolicyLearner",)


def run_config(directory: Path, **sections: Any) -> PPOConfig:
    """GRPO on the workload's model: one generator, one policy rank, a reward that costs nothing."""
    prompts = directory / "prompts.jsonl"
    if not prompts.is_file():
        lines = [json.dumps({"prompt": text, "answer": "good"}) for text in make_openings(PROMPTS, SEED)]
        prompts.write_text("\n".join(lines) + "\n")
    settings: dict[str, Any] = {
        "run": {"dir": str(directory / "run"), "seed": SEED},
        "cluster": {"dashboard": False, "object_store_mb": 256},
        "pools": {"default": {"cpus": 2}},
        "model": {"path": str(directory)},
        "rewards": {"exact": {"type": "exact_match"}},
        "prompts": {"path": str(prompts), "max_tokens": 32},
        "logging": {"samples_per_step": 0, "tensorboard": False, "ray_metrics": False},
        "generator": {"chunk": 16, "max_sequences": 64, "sampling": {"max_tokens": 32}},
        "policy": {"micro_batch_tokens": 1536, "optimizer": {"learning_rate": 1e-9}},
        "algorithm": {"estimator": "grpo", "epochs": 2, "mini_batches": 4},
        "coordinator": {"prompts_per_step": 32, "samples_per_prompt": 4},
    }
    return resolve(PPOConfig(**{name: {**settings.get(name, {}), **sections.get(name, {})}
                                for name in settings | sections}))


@dataclass(frozen=True)
class Steps:
    """Some steps in the middle of a turn: what came before the first and after the last is another matter."""

    rows: Sequence[Mapping[str, Any]]
    """Their metrics."""
    samples_each: int

    @property
    def samples_per_second(self) -> float:
        """Of all of them."""
        return self.samples_each * len(self.rows) / sum(row["time/step"] for row in self.rows)

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all their samples."""
        return round(sum(row["throughput/tokens_per_second"] * row["time/step"] for row in self.rows))

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """What each role did, as shares of the time."""
        return mean_shares(self.rows)


class OverlapRun:
    """A started team, and turns of some steps on it."""

    def __init__(self, config: PPOConfig, team: Team, prompts: PromptSource) -> None:
        self.config, self._team, self._prompts = config, team, prompts
        self._step, self._places = 0, ReplayBuffer(1, None, 0, 1.0).state_dict()

    async def turn(self, max_staleness: int, steps: int) -> Steps:
        """Make `steps` steps, and one before and one after that do not count."""
        config = self._config_of(max_staleness, steps + 2)
        state = RunState(FixedKL(config.algorithm.kl.coef),
                         PromptCursor(self._prompts.sizes, SEED, shuffle=True), step=self._step)
        buffer = ReplayBuffer((max_staleness + 1) * config.samples_per_step, None, max_staleness, 3600.0)
        buffer.load_state_dict(self._places, {})
        pipeline, rows = Pipeline(config, self._team, state, buffer, self._prompts), []
        quiet: Any = SimpleNamespace(write=lambda step, row: rows.append(row), update=lambda *_, **__: None,
                                     save=_nothing)
        silent: Any = SimpleNamespace(write=lambda *_: None)
        coordinator = Coordinator(
            config, self._team, state, buffer, pipeline, WeightSync(config.weights, self._team), recovery=quiet,
            evaluator=None, best=quiet, metrics=quiet, samples=silent, progress=quiet, stop=StopRequest(lambda _: None),
            on_evaluation=lambda *_: None)
        await coordinator.run()
        self._step, self._places = state.step, buffer.state_dict()
        return Steps(rows[1:-1], config.samples_per_step)

    def _config_of(self, max_staleness: int, steps: int) -> PPOConfig:
        run = self.config.run.model_copy(update={"steps": self._step + steps})
        loop = self.config.coordinator.model_copy(update={"max_staleness": max_staleness})
        return self.config.model_copy(update={"run": run, "coordinator": loop})


@asynccontextmanager
async def overlap_run(config: PPOConfig) -> AsyncIterator[OverlapRun]:
    """The team of `config`, started, each side on a core of its own."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    progress: Any = SimpleNamespace(note=lambda _: None)
    async with workplace(config) as place:
        team = spawn_team(config, place)
        prompts, _ = await start_team(config, place, team, progress)
        pin(GENERATION_SIDE, 0)
        pin(LEARNING_SIDE, 1)
        yield OverlapRun(config, team, prompts)


def pin(roles: Sequence[str], core: int) -> None:
    """Give all threads of these roles' workers one of this process's cores, if it has two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    for process in psutil.Process().children(recursive=True):
        if process.name().removeprefix("ray::").split(".")[0].split("/")[0] in roles:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {cores[core]})


async def _nothing() -> None:
    await asyncio.sleep(0)
