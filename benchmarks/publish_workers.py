"""A learner and two generators with different models of one shape, on a private Ray cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

import torch

from benchmarks.workload import MAX_CONTEXT, SEED
from rlhf_ray.cluster.resource_pools import Pools
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ArchitectureConfig, ModelConfig, NewModelConfig
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.models.loading import new_causal_lm
from rlhf_ray.roles.generator import Generator, generator_environment
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.stages.runtime import start_learners
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup

TIMEOUT_S = 240.0
HEAD_WIDTH = 64
GENERATION = GenerationConfig(workers=2, engine="in_process", chunk=8, max_sequences=16, threads=1)


@dataclass(frozen=True)
class Sizes:
    """Shape of a Llama-style model with the workload's small vocabulary, so that nearly all bytes are in its layers."""

    hidden: int
    intermediate: int
    layers: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each that vLLM packs, but for the small output head."""
        width, inner = self.hidden, self.intermediate
        return [(3 * width, width), (width, width), (2 * inner, width), (width, inner)] * self.layers


def make_models(directory: Path, name: str, sizes: Sizes) -> tuple[ModelConfig, ModelConfig]:
    """Random float32 models for the learner and the generators, saved beside the workload's tokenizer."""
    architecture = ArchitectureConfig(
        hidden_size=sizes.hidden, layers=sizes.layers, heads=sizes.hidden // HEAD_WIDTH,
        intermediate_size=sizes.intermediate, max_positions=MAX_CONTEXT)
    paths = [directory / f"publish-{name}-{role}" for role in ("learner", "generator")]
    for seed, path in enumerate(paths):
        torch.manual_seed(SEED + seed)
        new_causal_lm(NewModelConfig(architecture=architecture, tokenizer=str(directory))).save_pretrained(path)
        for file in directory.glob("*token*.json"):
            copy(file, path)
    learner, generator = (ModelConfig(path=str(path)) for path in paths)
    return learner, generator


@asynccontextmanager
async def publishing_roles(learner: ModelConfig, generator: ModelConfig) -> AsyncIterator[RoleGroups]:
    """Both roles started. `WeightSync` does not call the other roles."""
    configs = {"default": PoolConfig(bundles=1, cpus=2)}
    with ray_session(ClusterConfig(dashboard=False), configs, "publish"):
        pools = Pools(configs)
        await pools.open(TIMEOUT_S)
        policy = PolicyConfig()
        groups = (
            WorkerGroup("generator", Generator, GENERATION, pools, lambda rank: {
                "model": generator, "generation": GENERATION, "seed": SEED, "max_context": MAX_CONTEXT,
                "name": f"generator/{rank}"}, generator_environment(GENERATION), TIMEOUT_S),
            WorkerGroup("policy_learner", PolicyLearner, policy, pools, lambda rank: {
                "config": policy, "model": learner, "rank": rank, "world": 1, "seed": SEED, "total_steps": 1,
                "algorithm": AlgorithmConfig(), "temperature": 1.0}, {}, TIMEOUT_S),
        )
        generators, learners = groups
        try:
            await asyncio.gather(generators.start(), start_learners(learners, TIMEOUT_S))
            yield RoleGroups({"generator": generators, "policy": learners})
            await asyncio.gather(generators.values(Generator.stop), learners.values(PolicyLearner.leave))
        finally:
            for group in groups:
                group.kill()
            pools.close()
