"""The tiny run that tests of the whole system and chaos are made of: its models, prompts and settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.models import make_tiny_llama, make_tiny_reward_model

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
        "logging": {"ray_metrics": False, "tensorboard": True},
        "generator": {"workers": 2, "chunk": 4, "max_sequences": 8, "kv_cache_mb": 8,
                      "sampling": {"max_tokens": RESPONSE_TOKENS}},
        "policy": {**learner, "zero_stage": 1, "ema_decay": 0.9},
        "critic": {**learner, "zero_stage": 2},
        "algorithm": {"epochs": 2, "mini_batches": 2,
                      "kl": {"coef": 0.1, "kind": "adaptive", "target": 0.5, "horizon": 100}},
        "coordinator": {"prompts_per_step": 8, "samples_per_prompt": 2},
        "checkpoint": {"every": 2, "keep": 2},
    }


SMALL = {"generator": {"workers": 1}, "policy": {"workers": 1}, "critic": {"workers": 1, "zero_stage": 1},
         "evaluation": {"limit": 1}}
"""Sections of a run with one worker of each role."""
SHARED_BACKBONE = {"backbone": "policy", "workers": 1, "zero_stage": 1, "micro_batch_tokens": 4096, "optimizer": {}}
"""The critic's section of a run whose policy is its own critic: defaults in place of the settings above."""
