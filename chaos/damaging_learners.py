"""The learners of runs with faults: as the real ones, bit for bit, unless they are ordered to do damage."""

from __future__ import annotations

from chaos.nan_injection import NaNInjection
from chaos.weight_damage import WeightDamage
from rlhf_ray.roles.critic_learner import CriticLearner
from rlhf_ray.roles.policy_learner import PolicyLearner


class DamagingPolicyLearner(WeightDamage, NaNInjection, PolicyLearner):
    """One rank of the policy."""

    role = "policy_learner"


class DamagingCriticLearner(NaNInjection, CriticLearner):
    """One rank of the critic."""

    role = "critic_learner"


def install_damaging_learners() -> None:
    """Replace the learners of the runs of this process by these."""
    from rlhf_ray.stages import ppo_roles

    ppo_roles.PolicyLearner = DamagingPolicyLearner  # type: ignore[misc]
    ppo_roles.CriticLearner = DamagingCriticLearner  # type: ignore[misc]
