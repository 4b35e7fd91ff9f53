"""The two stages that examples have in common: imitation, then reinforcement learning."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.stages import ppo, sft
from rlhf_ray.stages.bundled_recipes import Recipe, refuse_other_start, run_once, timed
from rlhf_ray.stages.preflight import check_engine


def run_stages(
    recipe: Recipe, name: str, directory: Path, seed: int, estimator: str, overrides: list[str],
    make_data: Callable[[Path, int], None],
) -> tuple[Path, dict[str, float]]:
    """Data, SFT, and reinforcement learning by `estimator` (a file of the recipe); finished stages are kept.

    Args:
        name: of the example.
        overrides: `--section.key=value` changes of the reinforcement learning.
        make_data: writes the data of a seed below a directory, unless they exist.

    Returns:
        The directory of the reinforcement learning, and the seconds of each stage.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    began = time.perf_counter()
    config: Any = recipe.config("ppo", directory, seed, overrides, file=estimator)
    check_engine(config.cluster, config.generator)
    refuse_other_start(directory, seed)
    seconds = {"data": timed(lambda: make_data(directory, seed))}
    with ray_session(ClusterConfig(), {"default": PoolConfig(cpus=2)}, name):
        seconds["SFT"] = run_once("sft", lambda: sft.run(recipe.config("sft", directory, seed), True),
                                  directory / "sft")
        seconds[estimator] = run_once(estimator, lambda: ppo.run(config, True), Path(config.run.dir))
    seconds["in all, with Ray's start"] = max(time.perf_counter() - began, sum(seconds.values()))
    return Path(config.run.dir), seconds
