"""Roles that take their time: each answer comes after a random delay, so that calls finish in another order."""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.reference_scorer import ReferenceScorer
from rlhf_ray.roles.reward_scorer import RewardScorer
from tests.roles_in_runs import use_class

LONGEST_S = 0.15


def _seconds() -> float:
    """Mostly short, sometimes long; another series in every process and every run."""
    return LONGEST_S * random.SystemRandom().random() ** 3


class DelayedGenerator(Generator):
    async def generate(self, *args: Any) -> Any:
        await asyncio.sleep(_seconds())
        rollout = await super().generate(*args)
        await asyncio.sleep(_seconds())
        return rollout

    async def load_weights(self, *args: Any) -> None:
        await asyncio.sleep(_seconds())
        await super().load_weights(*args)


class DelayedReward(RewardScorer):
    async def score(self, *args: Any) -> Any:
        await asyncio.sleep(_seconds())
        return await super().score(*args)


class DelayedReference(ReferenceScorer):
    def logprobs(self, *args: Any) -> Any:
        time.sleep(_seconds())
        return super().logprobs(*args)


class DelayedAssembler(Assembler):
    def assemble(self, *args: Any, **columns: Any) -> Any:
        time.sleep(_seconds())
        return super().assemble(*args, **columns)


class DelayedPolicy(PolicyLearner):
    def logprobs(self, *args: Any) -> Any:
        time.sleep(_seconds())
        return super().logprobs(*args)

    def update(self, *args: Any) -> Any:
        time.sleep(3 * _seconds())
        return super().update(*args)


class DelayedCritic(CriticLearner):
    def values(self, *args: Any) -> Any:
        time.sleep(_seconds())
        return super().values(*args)


@contextmanager
def delayed_roles() -> Iterator[None]:
    """Runs of the enclosed work have roles that answer late."""
    with pytest.MonkeyPatch.context() as patch:
        for cls in (DelayedGenerator, DelayedReward, DelayedReference, DelayedAssembler, DelayedPolicy, DelayedCritic):
            use_class(patch, cls)
        yield
