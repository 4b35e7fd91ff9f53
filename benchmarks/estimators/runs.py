"""Models once, then one PPO run for each estimator and seed, through the public stages."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.estimators.outcome import Outcome, read_outcome
from benchmarks.estimators.settings import run_config
from rlhf_ray.config.load import load
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages import ppo, quickstart


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
