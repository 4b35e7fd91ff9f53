"""One update: policy and critic learn from a lease side by side, and what came of it is noted."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.pipeline import Pipeline
from rlhf_ray.coordinator.role_groups import RoleGroups
from rlhf_ray.coordinator.state import RunState
from rlhf_ray.records import ExperienceSummary, UpdateStats
from rlhf_ray.replay.buffer_state import Lease


@dataclass(frozen=True)
class Learned:
    """What an update did."""

    policy: UpdateStats | None
    """None while only the critic warms up."""
    critic: UpdateStats | None
    """None without a critic."""

    @property
    def applied(self) -> bool:
        """Whether any optimizer step changed any weight. Policy and critic leave out their steps each for itself."""
        return any(stats.applied for stats in (self.policy, self.critic) if stats is not None)

    def skipped(self) -> str | None:
        """Which steps were left out, in words; None if none were."""
        parts = [f"{stats.skipped} of the {name}'s {stats.skipped + stats.applied} optimizer steps"
                 for name, stats in (("policy", self.policy), ("critic", self.critic)) if stats and stats.skipped]
        return f"{' and '.join(parts)} left out: a loss or gradient was not finite" if parts else None


class Learning:
    """Lets the learners update, and keeps state, buffer and ledger in step with them."""

    def __init__(self, config: PPOConfig, roles: RoleGroups, state: RunState, pipeline: Pipeline,
                 warn: Callable[[str], None]) -> None:
        self._config, self._roles, self._state, self._pipeline, self._warn = config, roles, state, pipeline, warn

    async def learn(self, lease: Lease) -> tuple[Learned, list[ExperienceSummary]]:
        """Update policy and critic, and begin a new version; also what is known of the batch.

        Raises:
            TrainingError: too many updates in a row came to nothing (`optimizer.max_consecutive_skipped_updates`).
        """
        learned = await self._update_all(lease)
        if (said := learned.skipped()) is not None:
            self._warn(f"step {self._state.step + 1}: {said}")
        summaries = self._acknowledge(lease, learned)
        await self._pipeline.ledger.settled()
        return learned, summaries

    async def _update_all(self, lease: Lease) -> Learned:
        """Policy and critic learn from the same experience, side by side."""
        roles, coef = self._roles, self._state.kl.value
        if self._config.shares_backbone:
            return Learned(*await self._update(roles.policy, lease, "policy_update", coef, method="update_both"))
        warming_up = self._state.step < self._config.algorithm.critic_warmup_steps
        return Learned(*await asyncio.gather(
            self._update(None if warming_up else roles.policy, lease, "policy_update", coef),
            self._update(roles.critic, lease, "critic_update"),
        ))

    async def _update(
        self, group: WorkerGroup | None, lease: Lease, phase: str, *numbers: float, method: str = "update"
    ) -> Any:
        """What the first rank says; None without a group."""
        if group is None:
            return None
        calls = group.call_all(method, self._state.step, *numbers, *lease.refs)
        await asyncio.gather(*(self._roles.done(call, phase) for call in calls))
        return await calls[0].value()

    def _acknowledge(self, lease: Lease, learned: Learned) -> list[ExperienceSummary]:
        """The update was made: a new version begins. One that changed nothing leaves no mark on what is learned beside
        the weights, the KL coefficient and the scores' moments, either."""
        state, pipeline = self._state, self._pipeline
        pipeline.buffer.ack(lease, state.step)
        summaries = [pipeline.summaries.pop(entry.order) for entry in lease.entries]
        state.step += 1
        if learned.applied:
            pipeline.ledger.consumed(lease.keys, state.step)
            state.kl.update(float(np.concatenate([s.kl for s in summaries]).mean()), lease.samples)
            state.observe_scores(np.concatenate([s.scores for s in summaries]))
        else:
            pipeline.ledger.not_applied(lease.keys, state.step, "no loss and gradient of the update was finite")
        state.samples += lease.samples
        return summaries
