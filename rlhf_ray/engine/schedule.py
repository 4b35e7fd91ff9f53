"""Learning rate as a function of the optimizer step: linear warm-up, then constant, linear or cosine decay."""

import math

from rlhf_ray.config.learner import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`.

    Warm-up rises from peak/warmup to the peak. Decay ends at `min_ratio` x peak on the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    share = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_ratio + (1 - config.min_ratio) * share)
