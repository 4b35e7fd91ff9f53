"""Weights handed over to vLLM's own processes, by each transport: the whole way with real learners and real engines.
Generators that are lost in the middle of it, and one that comes later.

NCCL needs GPUs, so gloo carries the bytes here; all around it is what a GPU runs too: learner and generators meet, each
bucket is offered, sent, verified in vLLM's processes and loaded into the paused model.
"""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
import torch

from rlhf_ray.cluster.resource_pools import Pools
from rlhf_ray.cluster.session import ray_session
from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import GenerationConfig, WeightsConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.run import ClusterConfig, PoolConfig
from rlhf_ray.coordinator.canary import Canary
from rlhf_ray.coordinator.direct_sync import ALONE_S
from rlhf_ray.coordinator.weight_sync import WeightSync
from rlhf_ray.errors import ModelError, WorkerLost
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.generator_parity import given_rows
from rlhf_ray.records import WeightOffer
from rlhf_ray.roles.generator import Generator, generator_environment
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.stages.runtime import start_learners
from rlhf_ray.weights.manifest import checksum
from rlhf_ray.workers.generator_scaling import Scaling
from rlhf_ray.workers.health_monitor import Decision, HealthMonitor
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup
from tests.cluster.generators import KEYS, LONG, PROMPTS, SHORT, VOCAB
from tests.models import make_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CONTEXT, TIMEOUT_S, DAMAGED = 96, 240.0, 3
LATE, LATE_S, RETRY_S = 4, 3.0, 15.0
GENERATION = GenerationConfig(engine="async", workers=2, max_sequences=8, kv_cache_mb=16, sampling=SHORT)


class Damaging(PolicyLearner):
    """Says of version DAMAGED's first tensor what it is not, and sends version LATE late."""

    def _offered(self, version: int, index: int, whole: bool) -> WeightOffer | None:
        offer = super().offer_bucket(version, index, whole)
        if offer is None or version != DAMAGED or index:
            return offer
        digests = ["0" * 32, *offer.digests[1:]]
        return WeightOffer(version, index, offer.count, offer.entries, digests,
                           checksum(offer.entries, digests, version, index, offer.count), offer.handles)

    def offer_bucket(self, version: int, index: int, whole: bool = True) -> WeightOffer | None:
        self.late = version == LATE
        return self._offered(version, index, whole)

    def send_bucket(self) -> None:
        time.sleep(LATE_S if self.late else 0.0)
        super().send_bucket()


@asynccontextmanager
async def role_groups_of(learner, generator, policy, transport, health=None):
    configs = {"default": PoolConfig(cpus=2)}
    with ray_session(ClusterConfig(dashboard=False, object_store_mb=128), configs, "direct"):
        pools = Pools(configs)
        await pools.open(TIMEOUT_S)
        generators = WorkerGroup("generator", Generator, GENERATION, pools, lambda rank: {
            "model": generator, "generation": GENERATION, "seed": 0, "max_context": CONTEXT,
            "name": f"generator/{rank}", "transport": transport},
            generator_environment(GENERATION), TIMEOUT_S)
        learners = WorkerGroup("policy_learner", Damaging, policy, pools, lambda rank: {
            "config": policy, "model": learner, "rank": rank, "world": policy.workers, "seed": 0, "total_steps": 1,
            "algorithm": AlgorithmConfig(), "temperature": 1.0}, {}, TIMEOUT_S)
        try:
            await asyncio.gather(generators.start(), start_learners(learners, TIMEOUT_S))
            yield RoleGroups({"generator": generators, "policy": learners}, health=health or HealthMonitor())
            await learners.values(PolicyLearner.leave)
        finally:
            for group in (generators, learners):
                group.kill()
            pools.close()


async def gaps(roles):
    """Largest difference of log-probabilities between the learner and each generator."""
    found = []
    for rollout in await drawn(roles, SHORT):
        ours = np.concatenate([share.values for share in await roles.policy.values(PolicyLearner.logprobs, rollout)])
        found.append(float(np.abs(ours - rollout.logprobs)[rollout.response_mask].max()))
    return found


async def drawn(roles, sampling):
    return await roles.generators.values(Generator.generate, PROMPTS, KEYS, 3, sampling)


async def the_whole_way(roles, transport, model):
    canary = Canary(roles, given_rows(pretrained_config(model), CONTEXT - 1), model.path)
    sync = WeightSync(WeightsConfig().model_copy(update={"transport": transport}), roles, canary=canary)
    with pytest.raises(ModelError, match="generator/0 and the policy learner compute different models"):
        await canary.compare_at_start()
    assert min(await gaps(roles)) > 0.01, "the generators start with other weights"
    first = await sync.publish(1)
    assert first.nbytes > 100_000 and first.pause_seconds > 0
    assert max(await gaps(roles)) < 1e-4 and await canary.mismatch() is None
    assert await roles.generators.values(Generator.version) == [1, 1]
    drawing = asyncio.create_task(drawn(roles, LONG))
    while not all(await roles.generators.values(Generator.tokens_made)):
        await asyncio.sleep(0.01)
    await sync.publish(2)
    assert await canary.mismatch() is None and canary.metrics()["weights/canary_moved"] == 0.0
    for rollout in await drawing:
        assert set(rollout.versions[rollout.response_mask].tolist()) <= {1, 2}
    assert await roles.generators.values(Generator.version) == [2, 2]
    if transport == "object_store":  # whose damage the generator finds itself (tests/unit/weights)
        return
    with pytest.raises(WorkerLost, match="arrived with digest") as lost:
        await sync.publish(DAMAGED)
    assert lost.value.kind == "broke"


@pytest.mark.parametrize(("transport", "zero_stage"), [("object_store", 1), ("nccl", 3), ("nccl", 1)])
def test_weights_reach_every_generator_verified(tmp_path, transport, zero_stage):
    shape = {"vocab": VOCAB, "hidden": 64, "heads": 2, "tied": zero_stage == 3}
    learner, generator = (ModelConfig(path=str(make_tiny_llama(tmp_path / str(seed), seed=seed, **shape)))
                          for seed in (0, 1))
    policy = PolicyConfig(workers=2, zero_stage=zero_stage, micro_batch_tokens=256)

    async def run():
        async with role_groups_of(learner, generator, policy, transport) as roles:
            await the_whole_way(roles, transport, generator)

    torch.manual_seed(0)
    asyncio.run(run())


async def killed(roles):
    """Generator 1 dies while it waits for a bucket."""
    await asyncio.sleep(LATE_S / 2)
    for pid, _ in reversed(roles.generators.processes(1).members):
        os.kill(pid, signal.SIGKILL)


async def stopped(roles):
    """A process of vLLM's stands still: its generator answers, and takes no bucket."""
    for pid, _ in roles.generators.processes(1).members[1:]:
        os.kill(pid, signal.SIGSTOP)


class GivenUp(HealthMonitor):
    """Gives lost generators up, and replaces none."""

    def __init__(self):
        super().__init__()
        self.group, self.ranks = None, []

    def lost(self, error, work=0, silent_s=None):
        self.ranks.append(error.rank)
        self.group.give_up(error.rank, str(error))
        return Decision.RETRY


@pytest.mark.parametrize("fate", [killed, stopped], ids=lambda fate: fate.__name__)
def test_a_generator_lost_in_a_broadcast_holds_nobody_for_long_and_is_named(tmp_path, fate):
    shape = {"vocab": VOCAB, "hidden": 64, "heads": 2, "tied": False}
    learner, generator = (ModelConfig(path=str(make_tiny_llama(tmp_path / str(seed), seed=seed, **shape)))
                          for seed in (0, 1))

    async def run():
        policy = PolicyConfig(workers=1, micro_batch_tokens=256)
        health = GivenUp()
        async with role_groups_of(learner, generator, policy, "nccl", health) as roles:
            health.group = roles.generators
            sync = WeightSync(WeightsConfig().model_copy(update={"transport": "nccl"}), roles, RETRY_S)
            await sync.publish(1)
            publishing, began = asyncio.create_task(sync.publish(LATE)), time.monotonic()
            await fate(roles)
            with pytest.raises(WorkerLost, match="generator/1") as raised:
                await publishing
            assert (raised.value.role, raised.value.rank) == ("policy_learner", 0)
            assert time.monotonic() - began < LATE_S + RETRY_S + ALONE_S + 5
            assert sorted(health.ranks) == [0, 1], "the other one has a part of the model"
            for pid, _ in roles.generators.processes(1).members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    asyncio.run(run())


def test_a_generator_that_comes_later_meets_the_learner_and_the_others_again(tmp_path):
    shape = {"vocab": VOCAB, "hidden": 64, "heads": 2, "tied": False}
    learner, generator = (ModelConfig(path=str(make_tiny_llama(tmp_path / str(seed), seed=seed, **shape)))
                          for seed in (0, 1))

    async def run():
        policy = PolicyConfig(workers=1, micro_batch_tokens=256)
        async with role_groups_of(learner, generator, policy, "nccl") as roles:
            sync = WeightSync(WeightsConfig().model_copy(update={"transport": "nccl"}), roles, RETRY_S)
            await sync.publish(1)
            scaling = Scaling(ClusterConfig(start_timeout_s=TIMEOUT_S), roles, sync, lambda count: None,
                              lambda count: None, lambda text: None)
            await scaling.asked({"generators": 3})
            assert len(roles.generators) == 3 and max(await gaps(roles)) < 1e-4
            assert await roles.generators.values(Generator.version) == [1, 1, 1]
            await sync.publish(2)
            assert await roles.generators.values(Generator.version) == [2, 2, 2]

    asyncio.run(run())
