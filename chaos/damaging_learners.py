"""The learners of runs with faults: as the real ones, bit for bit, unless they are ordered to do damage. They keep
journals for the witness.
"""

from __future__ import annotations

from chaos.nan_injection import NaNInjection
from chaos.weight_damage import WeightDamage
from chaos.witness.learners import WitnessedCriticLearner, WitnessedPolicyLearner


class DamagingPolicyLearner(WeightDamage, NaNInjection, WitnessedPolicyLearner):
    """One rank of the policy."""


class DamagingCriticLearner(NaNInjection, WitnessedCriticLearner):
    """One rank of the critic."""


def install_damaging_learners() -> None:
    """Replace the learners of the runs of this process by these."""
    from rlhf_ray.stages import ppo_roles

    ppo_roles.PolicyLearner = DamagingPolicyLearner  # type: ignore[misc]
    ppo_roles.CriticLearner = DamagingCriticLearner  # type: ignore[misc]
