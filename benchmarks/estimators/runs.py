"""Models once, then one PPO run for each estimator and seed, through the public stages."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.estimators.outcome import Outcome, read_outcome
from rlhf_ray.config.estimators import GROUP_ESTIMATORS, METHODS
from rlhf_ray.config.load import load, resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages import ppo, quickstart
from rlhf_ray.stages.quickstart import RECIPE

ESTIMATORS = tuple(name for name in METHODS if name != "gdpo")
"""All but the one for several rewards: the quickstart has one."""
STEPS = 24
"""Updates of 128 samples: 3,072 samples a run."""
GROUPS = ("--coordinator.prompts_per_step=32", "--coordinator.samples_per_prompt=4")
"""Estimators that compare a prompt's samples make four of each of 32 prompts: 128 samples a step, as the others."""
WITHOUT_CRITIC = ("--critic.cpus=0.1", "--critic.micro_batch_tokens=4096", "--critic.optimizer.learning_rate=9e-6")
"""Defaults in place of the recipe's critic, for estimators that train none."""
OWN: dict[str, tuple[str, ...]] = {
    # Its advantages are divided by the group's deviation, about 2 units of reward here, and so is the penalty.
    "grpo": ("--algorithm.kl.coef=0.08",),
    # With the penalty in the loss it is dr_grpo number for number; in the rewards it stands at the tokens that paid it.
    "reinforce_baseline": ("--algorithm.kl.placement=reward",),
}
"""Settings of one estimator alone."""


def run_config(estimator: str, seed: int, steps: int, models: Path, directory: Path) -> PPOConfig:
    """The whole configuration of one run.

    Args:
        models: a quickstart's directory, which holds the data, the SFT model and the reward model.
        directory: where the run is written.
    """
    groups = GROUPS if estimator in GROUP_ESTIMATORS else ()
    critic = WITHOUT_CRITIC if estimator != "gae" else ()
    return resolve(RECIPE.config("ppo", models, seed, [
        f"--run.dir={directory}", f"--run.steps={steps}", f"--algorithm.estimator={estimator}", "--checkpoint.every=0",
        "--checkpoint.every_minutes=0", "--logging.tensorboard=false", *groups, *critic, *OWN.get(estimator, ())]))


def models_of(given: Path | None, home: Path) -> Path:
    """The directory with data, SFT model and reward model; made by the quickstart's stages where none is given.

    All runs share them, whatever their seed: what differs between runs is the reinforcement learning alone.

    Raises:
        ConfigError: the directory given is not a quickstart's.
    """
    if given is None:
        quickstart.make_models(home / "models", seed=0)
        return home / "models"
    missing = [path for part in ("data/prompts.jsonl", "sft/model", "reward_model/model")
               if not (path := given / part).exists()]
    if missing:
        raise ConfigError(f"--models {given} is not a quickstart's directory: {missing[0]} is missing; give one that "
                          "`rlhf-ray quickstart --dir DIR` wrote, or leave it out")
    return given


def run_all(estimators: Sequence[str], seeds: Sequence[int], steps: int, models: Path,
            home: Path) -> dict[str, list[Outcome]]:
    """Every estimator with every seed, one after another, seed by seed; finished runs are read only.

    Returns:
        Estimator -> its outcomes in the order of `seeds`.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in estimators}
    for seed in seeds:
        for name in estimators:
            directory = home / name / f"seed_{seed}"
            run_unless_finished(run_config(name, seed, steps, models, directory))
            outcomes[name].append(read_outcome(name, seed, directory))
            o = outcomes[name][-1]
            print(f"{name} seed {seed}: gold {o.gold_before:.3f} -> {o.gold_after:.3f}, KL {o.kl_after:.2f}, "
                  f"{o.seconds:.0f} s", flush=True)
    return outcomes


def run_unless_finished(config: PPOConfig) -> None:
    """Run or resume, unless a summary says that it is done.

    Raises:
        ConfigError: there is a run already, with other settings, whose figures would be taken for these.
    """
    directory = RunDirectory(Path(config.run.dir))
    if directory.traces() and load(PPOConfig, directory.config, []) != config:
        raise ConfigError(f"{directory.path} holds a run with other settings; name another --dir, or remove it")
    if not directory.summary.is_file():
        ppo.run(config, resume=True)
