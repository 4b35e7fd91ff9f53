"""The workers of a PPO run by role."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rlhf_ray.observability.spans import StepClock
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.assembler import Assembler
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.episode_runner import EpisodeRunner
from rlhf_ray.roles.generator import Generator
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.reward_scorer import RewardScorer
from rlhf_ray.workers.calls import Call, Result, Role
from rlhf_ray.workers.dispatcher import WorkerDispatcher, finished
from rlhf_ray.workers.health_monitor import HealthMonitor, Ready, as_started
from rlhf_ray.workers.role_table import ScorerRow, scorer_rows
from rlhf_ray.workers.worker_group import WorkerGroup


@dataclass(frozen=True)
class RoleGroups:
    """Everything the coordinator calls.

    Example:
        >>> roles = RoleGroups({"generator": generators, "policy": learners})
        >>> roles.generators is generators, roles.critic
        (True, None)
    """

    by_section: Mapping[str, WorkerGroup[Any]]
    """The group of each role that the run has, in the order in which a step calls them."""
    health: HealthMonitor = field(default_factory=HealthMonitor)
    """Replaces lost workers of the registered dispatchers."""
    dispatchers: dict[str, WorkerDispatcher[Any]] = field(default_factory=dict)
    """By role; created on first use."""
    probe_seconds: dict[str, float] = field(default_factory=dict)
    """By role, the duration of the start-up comparison of packed passes with those of transformers."""

    @property
    def generators(self) -> WorkerGroup[Generator]:
        """The vLLM workers."""
        return self.by_section["generator"]

    @property
    def runners(self) -> WorkerGroup[EpisodeRunner] | None:
        """The workers that run episodes; None without environments."""
        return self.by_section.get("episode_runner")

    @property
    def reward(self) -> WorkerGroup[RewardScorer]:
        """The workers that compute the rewards."""
        return self.by_section["reward"]

    @property
    def assembler(self) -> WorkerGroup[Assembler]:
        """The workers that make experience."""
        return self.by_section["assembler"]

    @property
    def policy(self) -> WorkerGroup[PolicyLearner]:
        """The ranks of the policy."""
        return self.by_section["policy"]

    @property
    def actor_critic(self) -> WorkerGroup[ActorCriticLearner]:
        """The policy, where it is its own critic."""
        return cast(WorkerGroup[ActorCriticLearner], self.policy)

    @property
    def critic(self) -> WorkerGroup[CriticLearner] | None:
        """The ranks of the critic; None for estimators without one, and where the policy is its own."""
        return self.by_section.get("critic")

    def scorers(self) -> list[ScorerRow[Any]]:
        """The rows of the frozen scorers that the run has."""
        return [row for row in scorer_rows() if row.section in self.by_section]

    @property
    def clock(self) -> StepClock:
        """Records the working time of every call."""
        return self.health.clock

    def groups(self) -> list[WorkerGroup[Any]]:
        """All groups, in the order in which a step calls them."""
        return list(self.by_section.values())

    def learners(self) -> list[WorkerGroup[Learner]]:
        """The groups with a model under training; an evaluation alone has none."""
        return [self.by_section[name] for name in ("policy", "critic") if name in self.by_section]

    def trains(self, role: str | None) -> bool:
        """Whether the workers of a role are learners."""
        return role in {group.role for group in self.learners()}

    def all_groups(self) -> list[WorkerGroup[Any]]:
        """`groups`, and other groups that have a dispatcher."""
        groups = self.groups()
        return groups + [dispatcher.group for dispatcher in self.dispatchers.values() if dispatcher.group not in groups]

    def workers(self) -> dict[str, int]:
        """Number of workers by role."""
        return {group.role: len(group) for group in self.groups()}

    def dispatcher(self, group: WorkerGroup[Role]) -> WorkerDispatcher[Role]:
        """The dispatcher of a group whose workers are interchangeable."""
        if group.role not in self.dispatchers:
            self.dispatchers[group.role] = WorkerDispatcher(group, self.health)
        return self.dispatchers[group.role]

    def keep_alive(self, catch_up: Ready, introduce: Ready = as_started) -> None:
        """From now on, replace generators, episode runners, frozen scorers and assemblers when they are lost, and watch
        the learners.

        Args:
            catch_up: publishes the present weights to a generator that has just started.
            introduce: gives an episode runner that has just started its handles to generators.
        """
        learners = self.learners()
        self.health.register_learners(learners)
        prepared = {self.generators.role: catch_up}
        if self.runners is not None:
            prepared[self.runners.role] = introduce
        for group in self.groups():
            if group not in learners:
                self.health.register(self.dispatcher(group).scheduler, prepared.get(group.role, as_started))

    async def done(self, call: Call[Result], phase: str) -> Call[Result]:
        """Wait for a call without fetching its result, and record its working time under its role and `phase`."""
        return await finished(call, phase, self.clock)
