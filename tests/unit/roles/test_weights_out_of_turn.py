"""Calls about weights out of order: after their publication failed, or before it has begun."""

import asyncio

import pytest

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import PolicyConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.errors import NoWeightsPlan, WeightsError
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner
from tests.unit.weights.receivers import TENSORS, buckets_of, make_receiver


def test_a_late_bucket_of_a_publication_that_broke_off_does_not_disturb_the_next_one_of_the_same_version():
    generator = Generator(ModelConfig(path="m"), GenerationConfig(), seed=1, max_context=8)
    generator._engine, generator._receiver = object(), make_receiver()
    before, after = buckets_of(5), buckets_of(5, {name: -tensor for name, tensor in TENSORS.items()})

    async def run():
        await generator.begin_weights(1, 5, len(before))
        await generator.load_weights(before[0], 1)
        await generator.begin_weights(2, 5, len(after))
        with pytest.raises(WeightsError, match="generator/0 refuses bucket 1 of publication 1: the latest is 2"):
            await generator.load_weights(before[1], 1)
        for bucket in after:
            await generator.load_weights(bucket, 2)

    asyncio.run(run())
    generator._receiver.require_ready()
    generator._receiver.finish(5)
    assert generator._receiver.confirm() == 5


def test_a_learner_that_has_planned_nothing_says_so():
    learner = PolicyLearner(PolicyConfig(zero_stage=3), ModelConfig(path="m"), 0, 1, 0, 1, AlgorithmConfig(), 1.0)
    for ask in (lambda: learner.weight_bucket(1, 0), lambda: learner.offer_bucket(1, 0), learner.unchanged_weights):
        with pytest.raises(NoWeightsPlan, match="call plan_weights first"):
            ask()
