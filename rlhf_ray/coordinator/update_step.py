"""One update: policy and critic learn from a lease concurrently; state, buffer and ledger follow."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_ray.config.algorithm import AlgorithmConfig
from rlhf_ray.coordinator.run_state import RunState
from rlhf_ray.coordinator.step_metrics import mean_kl
from rlhf_ray.records import ExperienceSummary, UpdateStats
from rlhf_ray.replay.buffer import ReplayBuffer
from rlhf_ray.replay.chunk import Lease
from rlhf_ray.replay.ledger import Ledger
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.workers.calls import Call, Result
from rlhf_ray.workers.role_groups import RoleGroups


@dataclass(frozen=True)
class Learned:
    """The result of an update."""

    policy: UpdateStats | None
    """None while only the critic warms up."""
    critic: UpdateStats | None
    """None without a critic."""

    @property
    def applied(self) -> bool:
        """Whether any optimizer step changed any weight. Policy and critic skip steps independently."""
        return any(stats.applied for stats in (self.policy, self.critic) if stats is not None)

    def skipped(self) -> str | None:
        """A message about the skipped optimizer steps; None without any."""
        parts = [f"{stats.skipped} of the {name}'s {stats.skipped + stats.applied} optimizer steps"
                 for name, stats in (("policy", self.policy), ("critic", self.critic)) if stats and stats.skipped]
        return f"{' and '.join(parts)} left out: a loss or gradient was not finite" if parts else None


class Learning:
    """Runs the learners' updates, and keeps state, buffer and ledger consistent with them."""

    def __init__(self, config: AlgorithmConfig, shares_backbone: bool, roles: RoleGroups, state: RunState,
                 buffer: ReplayBuffer, ledger: Ledger, warn: Callable[[str], None]) -> None:
        self._config = config
        self._shares_backbone = shares_backbone
        self._roles = roles
        self._state = state
        self._warn = warn
        self._buffer = buffer
        self._ledger = ledger

    async def learn(self, lease: Lease) -> tuple[Learned, list[ExperienceSummary]]:
        """Update policy and critic, which makes a new version; returns the result and the batch's summaries.

        Raises:
            TrainingError: too many consecutive updates were skipped (`optimizer.max_consecutive_skipped_updates`).
        """
        learned = await self._update_all(lease)
        if (message := learned.skipped()) is not None:
            self._warn(f"step {self._state.step + 1}: {message}")
        summaries = self._acknowledge(lease, learned)
        await self._ledger.settled()
        return learned, summaries

    async def _update_all(self, lease: Lease) -> Learned:
        """Update policy and critic from the same experience, concurrently."""
        roles = self._roles
        step = self._state.step
        coef = self._state.kl.value
        batch = lease.experiences
        if self._shares_backbone:
            both = roles.actor_critic.call_all(ActorCriticLearner.update_both, step, coef, *batch)
            of_both = await self._of_first_rank(both, "policy_update")
            assert of_both is not None
            return Learned(*of_both)
        warming_up = step < self._config.warmup_steps
        policy = [] if warming_up else roles.policy.call_all(PolicyLearner.update, step, coef, *batch)
        critic = roles.critic.call_all(CriticLearner.update, step, *batch) if roles.critic else []
        return Learned(*await asyncio.gather(
            self._of_first_rank(policy, "policy_update"), self._of_first_rank(critic, "critic_update")))

    async def _of_first_rank(self, calls: "Sequence[Call[Result]]", phase: str) -> "Result | None":
        """The first rank's statistics, after all ranks are done; None without calls."""
        if not calls:
            return None
        await asyncio.gather(*(self._roles.done(call, phase) for call in calls))
        return await calls[0].value()

    def _acknowledge(self, lease: Lease, learned: Learned) -> list[ExperienceSummary]:
        """Acknowledge the lease and count the version. An update that changed no weight does not change the scores'
        moments; one that did not change the policy, as while only the critic warms up, leaves the KL coefficient."""
        state = self._state
        summaries = [chunk.summary for chunk in lease.chunks]
        self._buffer.ack(lease, state.step)
        state.step += 1
        if learned.applied:
            self._ledger.consumed(lease.keys, state.step)
            policy_moved = learned.policy is not None and learned.policy.applied
            if policy_moved and (kl := mean_kl(summaries)) is not None:
                state.kl.update(kl, sum(int((~np.isnan(s.scores)).sum()) for s in summaries))
            state.observe_scores(np.concatenate([s.scores for s in summaries]))
        else:
            self._ledger.not_applied(lease.keys, state.step, "no loss and gradient of the update was finite")
        state.samples += lease.samples
        return summaries
