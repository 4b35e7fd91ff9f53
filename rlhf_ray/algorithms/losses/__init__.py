"""Every loss that a learner minimises. Each is a scalar with a graph; empty masks give 0 and zero gradients.

`ppo` holds the losses of policy and critic, `supervised` those of demonstrations, preferences and step labels.
"""

from rlhf_ray.algorithms.losses.ppo import entropy_bonus, policy_loss, value_loss, value_stats
from rlhf_ray.algorithms.losses.supervised import lm_loss, pairwise_loss, process_reward_loss

__all__ = [
    "entropy_bonus",
    "lm_loss",
    "pairwise_loss",
    "policy_loss",
    "process_reward_loss",
    "value_loss",
    "value_stats",
]
