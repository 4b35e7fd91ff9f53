"""Every loss that a learner minimises. Each is a scalar with a graph; empty masks give 0 and zero gradients.

`ppo` holds the losses of policy and critic, `importance` the weights of their tokens, `supervised` the losses of
demonstrations, preferences and step labels.
"""

from rlhf_ray.algorithms.losses.importance import importance_weights
from rlhf_ray.algorithms.losses.ppo import (
    cispo_loss,
    entropy_bonus,
    kl_penalty,
    policy_loss,
    value_loss,
    value_stats,
)
from rlhf_ray.algorithms.losses.supervised import lm_loss, pairwise_loss, process_reward_loss

__all__ = [
    "cispo_loss",
    "entropy_bonus",
    "importance_weights",
    "kl_penalty",
    "lm_loss",
    "pairwise_loss",
    "policy_loss",
    "process_reward_loss",
    "value_loss",
    "value_stats",
]
