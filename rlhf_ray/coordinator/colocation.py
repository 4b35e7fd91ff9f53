"""GPU sharing of generators and learners: sleep and wake of generators, offload and reload of optimizer state.

    generation ──learning()──► update ──publishing()──► publication ──generation()──► generation

Before an update generators sleep, then learners reload their optimizer state. Before a publication learners offload it
and generators wake their weights; after the publication generators wake their cache.
"""

import asyncio

from rlhf_ray.config.generation import GenerationConfig
from rlhf_ray.config.learner import PPOLearnerConfig
from rlhf_ray.coordinator.broadcast_group import BroadcastGroup
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.learner import Learner
from rlhf_ray.workers.calls import Method
from rlhf_ray.workers.role_groups import RoleGroups
from rlhf_ray.workers.worker_group import WorkerGroup


class Phases:
    """Switches between generation and learning as configured; does nothing by default. No call may be under way."""

    def __init__(self, generator: GenerationConfig, policy: PPOLearnerConfig, critic: PPOLearnerConfig,
                 roles: RoleGroups) -> None:
        self._dispatcher = roles.dispatcher(roles.generators)
        self._level = generator.sleep_level
        learners = [(policy, roles.policy), *([(critic, roles.critic)] if roles.critic else [])]
        self._offloading: list[WorkerGroup[Learner]] = [group for own, group in learners if own.offload_between_phases]
        self._asleep: set[int] = set()
        """Ranks of the generators that sleep; one that is replaced meanwhile is awake."""

    @property
    def drops_weights(self) -> bool:
        """Whether sleeping generators drop their weights, so that a publication must be whole."""
        return self._level > 1

    async def learning(self) -> None:
        """Prepare for an update.

        Raises:
            WorkerError: a generator has open requests (`WeightSync.require_idle` waits for them).
        """
        if self._level:
            asleep = BroadcastGroup(self._dispatcher, self._dispatcher.scheduler.up, phase="sleep")
            await asleep.each(asleep.calls(Generator.sleep))
            self._asleep = set(asleep.ranks)
        await self._call_learners(Learner.reload_state)

    async def publishing(self) -> None:
        """Prepare for a publication."""
        await self._call_learners(Learner.offload_state)
        await self._wake("weights")

    async def generation(self) -> None:
        """Prepare for generation."""
        await self._wake("kv_cache")
        self._asleep.clear()

    async def _wake(self, part: str) -> None:
        up = [rank for rank in self._dispatcher.scheduler.up if rank in self._asleep]
        asleep = BroadcastGroup(self._dispatcher, up)
        await asleep.each(asleep.calls(Generator.wake, [part]))

    async def _call_learners(self, method: Method[Learner, None]) -> None:
        calls = [call for group in self._offloading for call in group.call_all(method)]
        await asyncio.gather(*(call.done() for call in calls))
