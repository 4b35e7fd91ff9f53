"""Which files the workers of a stage read and write, by the pool that they run in."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rlhf_ray.cluster.pools import Pools
from rlhf_ray.cluster.reach import footprint, require_files
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import ModelReward
from rlhf_ray.config.stages import PPOConfig, StageConfig

WRITERS = ("policy", "critic", "learner", "assembler")
"""Sections of roles that write into the run's directory."""


async def require_shared_files(config: StageConfig, pools: Pools) -> None:
    """Refuse nodes that lack a model, or have another run.dir than this process.

    Raises:
        ClusterError: see `cluster.reach.require_files`.
    """
    nodes = {name: pools.nodes_of(name) for name in config.pools}
    directory = Path(config.run.dir)
    if not directory.is_dir():
        return
    with footprint(directory) as mark:
        wanted: dict[str, set[str]] = defaultdict(set)
        for role, place in config.placements().items():
            paths = {path for path in _models(config, role) if Path(path).exists()}  # others are names on the Hub
            for node in nodes[place.pool]:
                wanted[node] |= paths | ({mark} if role in WRITERS else set())
        await require_files({node: sorted(paths) for node, paths in wanted.items()})


def _models(config: StageConfig, role: str) -> Iterator[str]:
    """Paths of the models that a role loads; every role of a stage loads the tokenizer of `model`."""
    if isinstance(model := getattr(config, "model", None), ModelConfig):
        yield model.path
    if isinstance(config, PPOConfig) and role == "reward":
        yield from (reward.path for reward in config.rewards.values() if isinstance(reward, ModelReward))
    if isinstance(config, PPOConfig) and role == "critic":
        yield config.critic_model.path
