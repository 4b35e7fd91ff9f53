"""The number of generators that `rlhf-ray scale` left a run with, kept so that a resumed run has as many."""

import json
from contextlib import suppress

from rlhf_ray.config.bundles import Bundles, assigned
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.errors import ConfigError
from rlhf_ray.observability.run_directory import RunDirectory


def remember(directory: RunDirectory, configured: int, generators: int) -> None:
    """Note the present number; `configured`: what the configuration said when the run was started."""
    directory.write_json(directory.generators.name, {"generators": generators, "configured": configured})


def remembered(directory: RunDirectory, configured: int) -> int:
    """The number that a resumed run begins with: what it was scaled to, unless the configuration was changed since."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads(directory.generators.read_text())
        if noted["configured"] == configured:
            return int(noted["generators"])
    return configured


def with_generators(config: PPOConfig, count: int) -> PPOConfig:
    """The configuration with another number of generators, and as many bundles more in their pool as these need.

    Raises:
        ConfigError: by `weights.transport`, weights would not reach generators in other bundles.
    """
    name = config.generator.pool
    scaled = config.model_copy(update={"generator": config.generator.model_copy(update={"workers": count})})
    users = {role: place for role, place in scaled.placements().items() if place.pool == name}
    pool = config.pools[name]
    while not isinstance(assigned(pool, users), Bundles):
        pool = pool.model_copy(update={"bundles": pool.bundles + 1})
    if config.weights.transport == "ipc" and pool.bundles > config.pools[name].bundles:
        raise ConfigError(
            f"{count} generators of {config.generator.gpus:g} gpus need {pool.bundles} bundles of pools.{name}, and "
            "weights.transport=ipc hands weights over within the one GPU of its one bundle; ask for fewer, or --resume "
            "the run with --weights.transport=object_store, which reaches generators everywhere")
    return scaled.model_copy(update={"pools": {**config.pools, name: pool}})
