"""Tiny models, prompt files, and one finished PPO run that several tests look at."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlhf_ray.cluster.calls import traffic
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.records import Prompts, SampleKey, offsets_of
from tests.cluster.processes import abandoned, descendants, shared_memory
from tests.cluster.ranks import floor, fresh_ranks, ranks
from tests.models import make_tiny_llama, make_tiny_reward_model

__all__ = ["floor", "fresh_ranks", "ranks"]

VOCAB = 64
PROMPT_TOKENS = 8
RESPONSE_TOKENS = 12


@dataclass(frozen=True)
class Files:
    """What the runs of these tests start from."""

    root: Path
    policy: Path
    """Untied Llama."""
    tied: Path
    """Tied Llama."""
    reward: Path
    prompts: Path
    evaluation: Path


@dataclass
class FinishedRun:
    """One run, and what was true of the process around it."""

    directory: Path
    config: PPOConfig
    summary: dict[str, Any]
    output: str
    """What it printed."""
    received: int
    """Bytes that the driver received from workers during the run, model loading and evaluation included."""
    children: list[str]
    """Command lines of processes of ours that were still there after the run."""
    segments: set[str]
    """Shared-memory segments that the run left and nobody uses."""
    finals: dict[str, list[Any]] = field(default_factory=dict)
    """What generators and policy said of themselves after the last step (see `look_at_the_end`)."""


def write_prompts(path: Path, rows: int, seed: int, too_long: int = 0) -> Path:
    """A file of prompts of 2 to PROMPT_TOKENS random words, and some of one word more at the end."""
    rng = np.random.default_rng(seed)
    lengths = [*rng.integers(2, PROMPT_TOKENS + 1, rows), *[PROMPT_TOKENS + 1] * too_long]
    texts = [" ".join(f"w{i}" for i in rng.integers(2, VOCAB, length)) for length in lengths]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def make_files(root: Path) -> Files:
    """Models and prompts below an existing directory."""
    shape = {"vocab": VOCAB, "hidden": 32, "heads": 1}
    return Files(
        root=root,
        policy=make_tiny_llama(root / "policy", tied=False, **shape),
        tied=make_tiny_llama(root / "tied", tied=True, seed=3, **shape),
        reward=make_tiny_reward_model(root / "reward", VOCAB),
        prompts=write_prompts(root / "prompts.jsonl", 20, seed=1, too_long=3),
        evaluation=write_prompts(root / "held_out.jsonl", 6, seed=2),
    )


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    """Models and prompts, made once."""
    return make_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def configure(files):
    """configure(directory, **sections) -> configuration file of a tiny run with these sections changed."""

    def write(directory: Path, **sections: dict[str, Any]) -> Path:
        settings = ppo_settings(files, directory)
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section}
        path = directory.parent / f"{directory.name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


def ppo_settings(files: Files, directory: Path) -> dict[str, Any]:
    """A run of 4 steps with two generators and two ranks of each learner, saved every 2 steps."""
    learner = {"workers": 2, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 0.01, "grad_clip": 1.0}}
    return {
        "run": {"dir": str(directory), "steps": 4, "seed": 5},
        "cluster": {"dashboard": False, "object_store_mb": 128, "start_timeout_s": 200, "call_timeout_s": 120},
        "pools": {"default": {"cpus": 4}},
        "model": {"path": str(files.policy)},
        "rewards": {"main": {"type": "model", "path": str(files.reward)}},
        "prompts": {"path": str(files.prompts), "max_tokens": PROMPT_TOKENS},
        "evaluation": {"prompts": str(files.evaluation), "limit": 4},
        "logging": {"ray_metrics": False, "tensorboard": True, "samples_per_step": 2},
        "generator": {"workers": 2, "chunk": 4, "max_sequences": 8, "kv_cache_mb": 8,
                      "sampling": {"max_tokens": RESPONSE_TOKENS}},
        "policy": {**learner, "zero_stage": 1, "ema_decay": 0.9},
        "critic": {**learner, "zero_stage": 2},
        "algorithm": {"epochs": 2, "mini_batches": 2,
                      "kl": {"coef": 0.1, "kind": "adaptive", "target": 0.5, "horizon": 100}},
        "coordinator": {"prompts_per_step": 8, "samples_per_prompt": 2},
        "checkpoint": {"every": 2, "keep": 2},
    }


@pytest.fixture(scope="session")
def finished(configure, tmp_path_factory) -> FinishedRun:
    """One whole run inside this process."""
    from rlhf_ray.stages import ppo

    directory = tmp_path_factory.mktemp("finished") / "run"
    config = load(PPOConfig, configure(directory), [])
    segments, received, output = shared_memory(), traffic.received, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        finals = look_at_the_end(patch)
        summary = ppo.run(config)
    return FinishedRun(directory, config, summary, output.getvalue(), traffic.received - received, descendants(),
                       abandoned(segments), finals)


def look_at_the_end(patch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Ask every generator, after the run's last step, for its version, its number of tokens made, and some samples."""
    from rlhf_ray.coordinator.loop import Coordinator

    prompts = Prompts(offsets_of([3]), np.array([5, 6, 7], np.int32), [""], [{}], np.arange(1))
    keys = [SampleKey(9, 0, sample) for sample in range(4)]

    found: dict[str, list[Any]] = {}
    run = Coordinator.run

    async def run_and_look(self: Coordinator) -> None:
        await run(self)
        for method in ("version", "tokens_made"):
            found[method] = await self.team.generators.values(method)
        found["generate"] = await self.team.generators.values("generate", prompts, keys, 1)

    patch.setattr(Coordinator, "run", run_and_look)
    return found


SMALL = {"generator": {"workers": 1}, "policy": {"workers": 1}, "critic": {"workers": 1}, "evaluation": {"limit": 1}}
"""Sections of a run with one worker of each role."""


@pytest.fixture
def copy_of_the_run(finished, tmp_path):
    """A copy of the finished run's directory, under its own name."""
    return shutil.copytree(finished.directory, tmp_path / "copy")
