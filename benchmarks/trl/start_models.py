"""The SFT and reward models that both sides start from: a quickstart's, or those of shorter lessons of its kind."""

from functools import partial
from pathlib import Path

from benchmarks.trl.environment import CACHE
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages import preferences, reward_model, sft
from rlhf_ray.stages.bundled_recipes import run_once
from rlhf_ray.stages.quickstart import RECIPE, make_data

QUICKSTART = Path("runs/quickstart")
LESSONS = {
    "sft": ["--run.steps=250"],
    "preferences": ["--prompts.limit=3000"],
    "reward-model": ["--run.steps=150"],
}
"""About half of what the quickstart takes: two minutes on two cores."""


def models() -> Path:
    """A directory laid out as the quickstart's: that of a finished one, or one that is made once and kept."""
    if all(RunDirectory(QUICKSTART / stage).finished_well() for stage in ("sft", "reward_model")):
        return QUICKSTART
    home = CACHE / "models"
    stages = {"sft": sft, "preferences": preferences, "reward-model": reward_model}
    make_data(home, seed=0)
    with ray_session(ClusterConfig(dashboard=False), {"default": PoolConfig(cpus=2)}, "models"):
        for name, stage in stages.items():
            config = RECIPE.config(name, home, 0, LESSONS[name])
            run_once(name, partial(stage.run, config, True), Path(config.run.dir))
    return home
