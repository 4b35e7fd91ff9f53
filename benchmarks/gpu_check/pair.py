"""One generator and one learner in a Ray cluster of their own, with other weights of the same shape."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Any

import torch

from benchmarks.gpu_check.pair_settings import ALGORITHM, PairSetting, Scale
from rlhf_ray.cluster.resource_pools import Pools
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.cluster.worker_environment import fixed_segments
from rlhf_ray.config.generation import WeightsConfig
from rlhf_ray.config.model import ModelConfig, NewModelConfig
from rlhf_ray.config.run import ClusterConfig
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.data.synthetic_reviews import make_reviews
from rlhf_ray.data.tokenizer import train_tokenizer
from rlhf_ray.models.loading import new_causal_lm
from rlhf_ray.roles.generator import Generator, generator_environment
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.stages.runtime import start_learners
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup

TIMEOUT_S = 240.0
SEED, TOKENIZER, REVIEWS = 0, 1024, 2000


@dataclass(frozen=True)
class Pair:
    """What a check is made with."""

    setting: PairSetting
    policy: ModelConfig
    """The learner's initial weights."""
    roles: RoleGroups
    sync: WeightSync


def make_models(directory: Path, scale: Scale, *roles: str) -> dict[str, ModelConfig]:
    """Random models of one shape for these roles, with a tokenizer. They are made on a GPU if there is one: on a CPU
    half a billion random numbers take ten seconds."""
    words = directory / "tokenizer"
    words.mkdir()
    train_tokenizer((review.text for review in make_reviews(REVIEWS, SEED)), TOKENIZER, words)
    found = {}
    for seed, role in enumerate(roles):
        torch.manual_seed(seed)
        new = NewModelConfig.model_validate(
            {"architecture": scale.architecture, "tokenizer": str(words), "dtype": scale.dtype})
        with torch.device("cuda" if scale.gpu and torch.cuda.is_available() else "cpu"):
            model = new_causal_lm(new)
        if scale.vocabulary > TOKENIZER:
            model.resize_token_embeddings(scale.vocabulary, mean_resizing=False)
        model.save_pretrained(directory / role)
        del model
        for file in words.glob("*.json"):
            copy(file, directory / role)
        found[role] = ModelConfig.model_validate({"path": str(directory / role), "dtype": scale.dtype})
    if scale.gpu:
        torch.cuda.empty_cache()
    return found


@asynccontextmanager
async def pair(setting: PairSetting, directory: Path) -> AsyncIterator[Pair]:
    """Both started. Adapters have one base on both sides."""
    models, configs = make_models(directory, setting.scale, "policy", "generator"), {"default": setting.pool}
    with ray_session(ClusterConfig(dashboard=False), configs, "gpu-check"):
        pools = Pools(configs)
        await pools.open(TIMEOUT_S)
        generators = _generators(setting, models["policy" if setting.lora else "generator"], pools)
        learners = _learners(setting, models["policy"], pools)
        try:
            await generators.start(timeout_s=TIMEOUT_S)  # first: vLLM measures what is free on a GPU that they share
            await start_learners(learners, TIMEOUT_S)
            roles = RoleGroups({"generator": generators, "policy": learners})
            weights: Any = WeightsConfig().model_copy(update={"transport": setting.transport})
            yield Pair(setting, models["policy"], roles, WeightSync(weights, roles, TIMEOUT_S))
            await asyncio.gather(generators.values(Generator.stop), learners.values(PolicyLearner.leave))
        finally:
            for group in (generators, learners):
                group.kill()
            pools.close()


def _generators(setting: PairSetting, model: ModelConfig, pools: Pools) -> WorkerGroup[Generator]:
    generation = setting.generation
    return WorkerGroup("generator", Generator, generation, pools, lambda rank: {
        "model": model, "generation": generation, "seed": SEED, "max_context": setting.scale.context,
        "name": f"generator/{rank}", "transport": setting.transport, "lora": setting.lora},
        generator_environment(generation), TIMEOUT_S)


def _learners(setting: PairSetting, model: ModelConfig, pools: Pools) -> WorkerGroup[PolicyLearner]:
    policy = setting.policy
    return WorkerGroup("policy_learner", PolicyLearner, policy, pools, lambda rank: {
        "config": policy, "model": model, "rank": rank, "world": 1, "seed": SEED, "total_steps": 100,
        "algorithm": ALGORITHM, "temperature": 1.0, "publishes_adapters": setting.lora is not None},
        fixed_segments() if setting.transport == "ipc" else {}, TIMEOUT_S)
