"""The learners and episode runners of runs with faults: as the real ones, bit for bit, unless they are ordered to do
damage. Learners keep journals for the witness.
"""

from __future__ import annotations

from dataclasses import replace

from chaos.gateway_failures import FailingGateway
from chaos.nan_injection import NaNInjection
from chaos.weight_damage import WeightDamage
from chaos.witness.learners import WitnessedCriticLearner, WitnessedPolicyLearner


class DamagingPolicyLearner(WeightDamage, NaNInjection, WitnessedPolicyLearner):
    """One rank of the policy."""


class DamagingCriticLearner(NaNInjection, WitnessedCriticLearner):
    """One rank of the critic."""


def install_damaging_learners() -> None:
    """Replace the learners and episode runners of the runs of this process by these."""
    from rlhf_ray.roles.critic_learner import CriticLearner
    from rlhf_ray.roles.episode_runner import EpisodeRunner
    from rlhf_ray.roles.policy_learner import PolicyLearner
    from rlhf_ray.workers import role_table

    damaging: dict[type, type] = {
        PolicyLearner: DamagingPolicyLearner, CriticLearner: DamagingCriticLearner, EpisodeRunner: FailingGateway}
    role_table.ROLE_TABLE = tuple(
        replace(row, cls=damaging.get(row.cls, row.cls)) for row in role_table.ROLE_TABLE
    )
