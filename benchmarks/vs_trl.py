"""Samples a second of whole PPO: `rlhf-ray ppo` beside TRL's PPO trainer, on the quickstart's task.

Both start from the same SFT and reward model, with the same prompts, batch, epochs, mini-batches, learning rates, clips
and KL coefficient. Each is one training run, start to end; they take turns of some updates, the other one at rest. What
both policies have come to is measured at last: speed at the price of quality would be no speed.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure
from benchmarks.side_process import run_in_process
from benchmarks.trl.environment import trl_python
from benchmarks.trl.paced_run import PacedRun
from benchmarks.trl.start_models import models
from rlhf_ray.config.estimators import GAEEstimator
from rlhf_ray.config.load import as_yaml, resolve
from rlhf_ray.config.losses import ClipLoss
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.stages.quickstart import RECIPE

GOAL = 2.0
TURNS, UPDATES_A_TURN = 5, 7
"""36 updates in all with the one that warms up, as the quickstart makes. The first of a turn is not counted."""
THREADS = 2
"""TRL's. It works in one process, and two threads that wait actively are its fastest way (docs/benchmark_notes.md)."""
OURS_IS = "rlhf-ray ppo, the quickstart's roles and placement"
THEIRS_IS = "TRL 1.12's PPO trainer, two threads"


def measure(directory: Path, repeats: int) -> dict[str, Figure]:
    """`vs_trl_samples_per_second`, over at most five turns of each side.

    Raises:
        SideFailed: TRL cannot be installed, or a run failed.
    """
    turns = min(repeats, TURNS)
    python = trl_python()
    home = run_in_process(models).absolute()
    config = our_config(home, directory / "ours", 1 + turns * UPDATES_A_TURN)
    ours, theirs = our_run(config, directory), their_run(python, config, home, directory)
    rates: list[tuple[float, float]] = []
    shares: list[float] = []
    with ours, theirs:
        for number in range(turns):
            order = (ours, theirs) if number % 2 else (theirs, ours)
            seconds = {run.name: median(run.turn(UPDATES_A_TURN)[1:]) for run in order}
            mine, other = (config.coordinator.samples_per_step / seconds[run.name] for run in (ours, theirs))
            rates.append((mine, other))
            shares.append(theirs.cpus / THREADS)
            print(f"turn {number + 1}: {mine:.1f} and {other:.1f} samples/s", file=sys.stderr, flush=True)
        ours.finish()
        theirs.finish()
    ratios = [mine / other for mine, other in rates]
    return {"vs_trl_samples_per_second": Figure(
        value=median(ratios), repeats=ratios, better="higher", goal=GOAL, ours_is=OURS_IS, theirs_is=THEIRS_IS,
        ours=median(mine for mine, _ in rates), theirs=median(other for _, other in rates), unit="samples/s",
        cpu_share=median(shares),
        more={
            "updates": config.run.steps, "samples_an_update": config.coordinator.samples_per_step,
            "seconds_to_first_update": {run.name: run.seconds_to_first_update for run in (ours, theirs)},
            "quality": run_in_process(qualities, directory, home),
        })}


def our_config(models: Path, directory: Path, updates: int) -> PPOConfig:
    """The quickstart's PPO stage without what TRL is spared too: evaluations, the judge, checkpoints on the way."""
    return resolve(RECIPE.config("ppo", models, 0, [
        f"--run.dir={directory}", f"--run.steps={updates}", "--evaluation=null", "--logging.judge=null",
        "--logging.tensorboard=false", "--checkpoint.every=0", "--checkpoint.every_minutes=0",
        "--cluster.dashboard=false"]))


def our_run(config: PPOConfig, directory: Path) -> PacedRun:
    """Our side, ready to be entered."""
    (directory / "ours.yaml").write_text(as_yaml(config))
    return PacedRun("ours", [sys.executable, "-m", "benchmarks.trl.rlhf_ray_run", directory / "ours.yaml"], {},
                    directory / "our_output", freeze=False)


def their_run(python: Path, config: PPOConfig, models: Path, directory: Path) -> PacedRun:
    """TRL's side with the numbers of ours, ready to be entered."""
    settings, home = their_settings(config, models, directory / "trl"), directory / "trl"
    home.mkdir()
    (home / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).parent / "trl" / "trl_run.py"
    threads = {"OMP_NUM_THREADS": str(settings["threads"]), "OMP_WAIT_POLICY": "active"}
    return PacedRun("TRL", [python, script, home / "settings.json"], threads, home, freeze=True)


def their_settings(config: PPOConfig, models: Path, directory: Path) -> dict[str, Any]:
    """What `trl/trl_run.py` reads."""
    algorithm, policy, sampling = config.algorithm, config.policy.optimizer, config.generator.sampling
    estimator, loss = algorithm.estimator, algorithm.loss
    assert isinstance(estimator, GAEEstimator) and isinstance(loss, ClipLoss), "TRL's PPO has these alone"
    return {
        "policy": str(models / "sft" / "model"), "reward_model": str(models / "reward_model" / "model"),
        "prompts": str(models / "data" / "prompts.jsonl"), "directory": str(directory), "threads": THREADS,
        "seed": config.run.seed, "updates": config.run.steps, "batch": config.coordinator.samples_per_step,
        "epochs": algorithm.epochs, "mini_batches": algorithm.mini_batches, "clip": loss.clip_low,
        "value_clip": algorithm.value_clip, "gamma": estimator.gamma, "lam": estimator.lam,
        "kl_coef": algorithm.kl.coef, "temperature": sampling.temperature, "response_tokens": sampling.max_tokens,
        "policy_rate": policy.learning_rate, "policy_min_ratio": policy.min_ratio,
        "critic_rate": config.critic.optimizer.learning_rate,
        "optimizer": {"betas": policy.betas, "eps": policy.eps, "weight_decay": policy.weight_decay},
    }


def qualities(directory: Path, models: Path) -> dict[str, dict[str, float]]:
    """What the SFT model and both tuned policies are worth on held-out prompts."""
    from benchmarks.trl.policy_quality import quality

    policies = {"before": models / "sft" / "model", "ours": directory / "ours" / "model",
                "TRL": directory / "trl" / "model"}
    return {name: quality(path, models) for name, path in policies.items()}
