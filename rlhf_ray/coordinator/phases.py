"""Whose turn it is on GPUs that generators and learners share: each gives back what the other needs meanwhile.

    generation ──learning()──► update ──publishing()──► publication ──generation()──► generation

Before an update generators go to sleep, then learners fetch their optimizer state; afterwards learners put it aside
before generators take memory again, the weights first, the cache when the publication is over.
"""

import asyncio

from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.broadcast_group import BroadcastGroup
from rlhf_ray.coordinator.role_groups import RoleGroups


class Phases:
    """Takes the turns that the configuration asks for; none by default. Nothing is in flight when they change."""

    def __init__(self, config: PPOConfig, roles: RoleGroups) -> None:
        self._dispatcher, self._level = roles.dispatcher(roles.generators), config.generator.sleep_level
        learners = [(config.policy, roles.policy), *([(config.critic, roles.critic)] if roles.critic else [])]
        self._offloading: list[WorkerGroup] = [group for own, group in learners if own.offload_between_phases]
        self._asleep: set[int] = set()
        """Ranks of the generators that were put to sleep; one that was lost meanwhile comes back awake."""

    @property
    def drops_weights(self) -> bool:
        """Whether generators have no weights left to which a publication could add."""
        return self._level > 1

    async def learning(self) -> None:
        """An update comes."""
        if self._level:
            asleep = BroadcastGroup(self._dispatcher, self._dispatcher.scheduler.up)
            await asleep.each("sleep")
            self._asleep = set(asleep.ranks)
        await self._tell("reload_state")

    async def publishing(self) -> None:
        """Weights come for the generators."""
        await self._tell("offload_state")
        await self._wake("weights")

    async def generation(self) -> None:
        """The new weights are in service."""
        await self._wake("kv_cache")
        self._asleep.clear()

    async def _wake(self, part: str) -> None:
        up = [rank for rank in self._dispatcher.scheduler.up if rank in self._asleep]
        await BroadcastGroup(self._dispatcher, up).each("wake", [part])

    async def _tell(self, method: str) -> None:
        calls = [call for group in self._offloading for call in group.call_all(method)]
        await asyncio.gather(*(call.done() for call in calls))
