"""What the runs share, and the few settings in which an estimator differs from the quickstart's own.

All else is the recipe's (configs/quickstart/ppo.yaml), the learning rate included. The aim is equal samples and a
similar KL: gold can be bought with KL, so estimators are told apart at the same price only.
"""

from pathlib import Path
from typing import get_args

from rlhf_ray.config.algorithm import GROUP_ESTIMATORS, Estimator
from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.stages.quickstart import RECIPE

ESTIMATORS: tuple[str, ...] = get_args(Estimator)
STEPS = 24
"""Updates of 128 samples: 3,072 samples a run."""
GROUPS = ("--coordinator.prompts_per_step=32", "--coordinator.samples_per_prompt=4")
"""Estimators that compare a prompt's samples make four of each of 32 prompts: 128 samples a step, as the others."""
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
    return resolve(RECIPE.config("ppo", models, seed, [
        f"--run.dir={directory}", f"--run.steps={steps}", f"--algorithm.estimator={estimator}", "--checkpoint.every=0",
        "--logging.tensorboard=false", *groups, *OWN.get(estimator, ())]))
