"""Seconds from the command `rlhf-ray ppo CONFIG` to the first rollout, with the quickstart's roles and model shapes.

Caches are warm: one start before the measured ones reads every file from disk and compiles what Python compiles once.
The clock stops when the first chunk of responses has come back whole, which is later than its first token.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.figure import Figure
from benchmarks.side_process import QUOTED_LOG, SideFailed, run_in_process
from rlhf_ray.config.load import as_yaml
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.stages.quickstart import RECIPE

GOAL_S = 15.0
STARTS = 3
PROMPTS = 256
TIMEOUT_S = 240.0


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """`first_token_seconds`, over three starts at most.

    Raises:
        SideFailed: a run failed.
    """
    home = directory / "first_token"
    run_in_process(prepare, directory, home)
    config = first_step(directory, home)
    seconds = [start(config, home / f"run_{number}") for number in range(min(repeats, STARTS) + 1)][1:]
    return {"first_token_seconds": Figure(
        value=median(seconds), repeats=seconds, better="lower", goal=GOAL_S, unit="s", ours=median(seconds),
        ours_is="from the command rlhf-ray ppo to its first rollout")}


def prepare(workload: Path, home: Path) -> None:
    """A reward model with a random head on the workload's model, and its prompts as a file."""
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.workload import prompts
    from rlhf_ray.models.loading import load_scalar_model, load_tokenizer

    disable_progress_bar()
    home.mkdir()
    model = ModelConfig(path=str(workload))
    load_scalar_model(model, new_head=True).save_pretrained(home / "reward_model")
    load_tokenizer(model).save_pretrained(home / "reward_model")
    texts = prompts(workload, PROMPTS).texts
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def first_step(workload: Path, home: Path) -> PPOConfig:
    """The quickstart's PPO stage, of one step."""
    return RECIPE.config("ppo", home, 0, [
        "--run.steps=1", "--evaluation=null", f"--model.path={workload}",
        f"--rewards.preference.path={home / 'reward_model'}", f"--prompts.path={home / 'prompts.jsonl'}"])


def start(config: PPOConfig, run: Path) -> float:
    """Seconds from one command to its first rollout."""
    file = run.with_suffix(".yaml")
    file.write_text(as_yaml(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})})))
    command = [sys.executable, "-m", "rlhf_ray.cli.main", "ppo", str(file)]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SideFailed(f"{' '.join(command)} ended with {done.returncode}; it printed:\n{done.stderr[-QUOTED_LOG:]}")
    return float(json.loads((run / "summary.json").read_text())["first_rollout_at"]) - began
