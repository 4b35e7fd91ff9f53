"""A real run on one set of real workers, in turns: some steps synchronous, then some overlapped, of the same samples.

The generator and the frozen scorers share one core, the learner has the other. Every turn begins with the same prompts
and seeds, and the learning rate is too small to change what is sampled, so all turns do the same work.
"""

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks.workload import SEED
from rlhf_ray.algorithms.kl import FixedKL
from rlhf_ray.config.derived import derive
from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.chunk_calls import ChunkCalls
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.rollout_source import PromptSource
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.step_profile import StepProfiler
from rlhf_ray.coordinator.stop import StopRequest
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.data.cursor import PromptCursor
from rlhf_ray.data.synthetic_reviews import make_openings
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.observability.spans import Span, StepClock, timeline
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.replay.ledger_tables import LedgerFacts
from rlhf_ray.stages.ppo_roles import spawn_roles, start_roles
from rlhf_ray.stages.runtime import open_runtime
from rlhf_ray.workers.role_groups import RoleGroups

PROMPTS = 1024
SIDES = {
    "generation": ("generator", "reference_scorer", "reward_scorer", "assembler"),
    "learning": ("policy_learner",),
}
"""Roles by the side whose core they have."""


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
        "logging": {"samples": "off", "tensorboard": False, "ray_metrics": False},
        "generator": {"chunk": 16, "max_sequences": 64, "sampling": {"max_tokens": 32}},
        "policy": {"micro_batch_tokens": 1536, "optimizer": {"learning_rate": 1e-9}},
        "algorithm": {"estimator": "grpo", "epochs": 2, "mini_batches": 4, "old_logprobs": "generator"},
        "coordinator": {"prompts_per_step": 32, "samples_per_prompt": 4},
    }
    whole: dict[str, Any] = {name: {**settings.get(name, {}), **sections.get(name, {})} for name in settings | sections}
    return resolve(PPOConfig(**whole))


@dataclass(frozen=True)
class Steps:
    """Some steps in the middle of a turn; the first of a turn has nothing to overlap with, and so has the last."""

    rows: Sequence[Mapping[str, Any]]
    """Their metrics."""
    idle: Mapping[str, float]
    """Share of the time in which a side had nothing to do, by the side."""
    samples_each: int

    @property
    def samples_per_second(self) -> float:
        """Of all of them."""
        return self.samples_each * len(self.rows) / self.seconds("time/step")

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all their samples."""
        return round(sum(row["throughput/tokens_per_second"] * row["time/step"] for row in self.rows))

    def seconds(self, metric: str) -> float:
        """Of all steps together."""
        return float(sum(row[metric] for row in self.rows))


class Watch:
    """Takes the rows of a run's metrics, and notes what the sides did in each step while the clock still knows."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.rows: list[Mapping[str, Any]] = []
        self.idle: list[dict[str, float]] = []
        """Seconds by side, a step."""

    def write(self, _: int, row: Mapping[str, Any]) -> None:
        """A step is over."""
        end = self._clock.now()
        spans = self._clock.work(end - row["time/step"], end)
        named = [Span(side, 0, s.start, s.end) for s in spans for side, roles in SIDES.items() if s.role in roles]
        line = timeline(named, end - row["time/step"], end, SIDES)
        self.idle.append({side: float(line.seconds[line.busy[side] == 0].sum()) for side in SIDES})
        self.rows.append(row)

    def middle(self, samples: int) -> Steps:
        """All steps but the first and the last."""
        rows, idle = self.rows[1:-1], self.idle[1:-1]
        seconds = sum(row["time/step"] for row in rows)
        return Steps(rows, {side: sum(step[side] for step in idle) / seconds for side in SIDES}, samples)


class OverlapRun:
    """A started team, and turns of some steps on it."""

    def __init__(self, config: PPOConfig, roles: RoleGroups, prompts: PromptSource) -> None:
        self.config, self._roles, self._prompts = config, roles, prompts
        self._weights = WeightSync(config.weights, roles)
        self._step, self._places = 0, ReplayBuffer(1, None, 0).state_dict()

    async def turn(self, max_staleness: int, steps: int) -> Steps:
        """Make `steps` steps, and one before and one after that do not count."""
        config = self._config_of(max_staleness, steps + 2)
        state = RunState(FixedKL(config.algorithm.kl.coef),
                         PromptCursor(self._prompts.sizes, SEED, shuffle=True), step=self._step, published=self._step)
        buffer = ReplayBuffer((max_staleness + 1) * config.coordinator.samples_per_step, None, max_staleness)
        buffer.load_state_dict(self._places, {})
        watch, silent = Watch(self._roles.clock), _Silent()
        with self._ledger(config, state.cursor) as ledger:
            derived = derive(config)
            calls = ChunkCalls(self._roles, derived)
            pipeline = Pipeline(config, self._roles, calls, state, buffer, self._prompts, ledger)
            await Coordinator(
                config, derived, self._roles, state, buffer, calls, pipeline, self._weights,
                recovery=cast(Any, silent), evaluator=None, best=cast(Any, silent), metrics=cast(Any, watch),
                sample_saving=cast(Any, silent), progress=cast(Any, silent), stop=StopRequest(lambda _: None),
                on_evaluation=lambda *_: None, profiler=StepProfiler(RunDirectory(Path(config.run.dir)), self._roles),
            ).run()
        self._step, self._places = state.step, buffer.state_dict()
        return watch.middle(config.coordinator.samples_per_step)

    def _config_of(self, max_staleness: int, steps: int) -> PPOConfig:
        run = self.config.run.model_copy(update={"steps": self._step + steps})
        loop = self.config.coordinator.model_copy(update={"max_staleness": max_staleness})
        return self.config.model_copy(update={"run": run, "coordinator": loop})

    @contextmanager
    def _ledger(self, config: PPOConfig, cursor: PromptCursor) -> Iterator[Ledger]:
        """The books of one turn, on disk as a run's are."""
        path = Path(config.run.dir) / "ledger.sqlite"
        path.unlink(missing_ok=True)
        ledger = Ledger.create(path, LedgerFacts.of(config.coordinator, cursor))
        try:
            yield ledger
        finally:
            ledger.close()


class _Silent:
    """Checkpoints, samples and progress of a turn: none."""

    async def save(self) -> None:
        """Nothing is kept."""

    async def settled(self, wait: bool = True) -> None:
        """Nothing is waited for."""

    async def close(self, hurry: bool = False) -> None:
        """Nothing is under way."""

    def write(self, *_: Any) -> None:
        """Nothing is written."""

    def update(self, *_: Any, **__: Any) -> None:
        """Nothing is shown."""

    def note(self, _: str) -> None:
        """Nothing is said."""

    def warn(self, text: str) -> None:
        """But a warning is."""
        print(text, file=sys.stderr, flush=True)


@asynccontextmanager
async def overlap_run(config: PPOConfig) -> AsyncIterator[OverlapRun]:
    """The team of `config`, started, each side on a core of its own."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    async with open_runtime(config) as runtime:
        derived = derive(config)
        roles = spawn_roles(config, derived, runtime)
        prompts, _ = await start_roles(config, derived, runtime, roles, lambda _: None)
        give_cores()
        yield OverlapRun(config, roles, prompts)


def give_cores() -> None:
    """Bind all threads of each side's workers to one of this process's cores, if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    titles = {"ray::" + role.title().replace("_", ""): core
              for core, roles in zip(cores, SIDES.values(), strict=False) for role in roles}
    if len(cores) < len(SIDES):
        return
    for process in psutil.Process().children(recursive=True):
        core = titles.get(process.name().split(".")[0])
        if core is not None:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})
