"""What a run leaves on disk: checkpoints that are kept, the one being written, and models in Hugging Face format."""

from collections.abc import Sequence

from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.stages import PPOConfig, StageConfig
from rlhf_ray.planning.geometry import counted
from rlhf_ray.planning.learner_memory import MOMENTS, trained
from rlhf_ray.planning.roles import Role

FLOAT = 4
LOGS = 50 * 2**20
"""Metrics, samples, ledger, report: some dozen MiB of a usual run."""


def checkpoint_bytes(config: StageConfig, roles: Sequence[Role]) -> float:
    """One checkpoint: weights and AdamW's moments in float32 of what is trained, and the average where there is one;
    and the experience that may wait in the buffer."""
    learners = [role for role in roles if isinstance(role.placement, LearnerConfig)]
    whole = 0.0
    for role in learners:
        assert isinstance(role.placement, LearnerConfig)
        average = getattr(role.placement, "ema_decay", None) is not None
        whole += FLOAT * (1 + MOMENTS + average) * trained(role.placement, role.models[0])
    if isinstance(config, PPOConfig) and config.coordinator.max_staleness:
        longest = config.prompts.max_tokens + config.generator.sampling.max_tokens
        whole += 29.0 * config.coordinator.max_staleness * config.samples_per_step * longest
    return whole


def disk_of(config: StageConfig, roles: Sequence[Role]) -> dict[str, float]:
    """Bytes by what they are; nothing for a stage that keeps no checkpoints."""
    checkpoint = getattr(config, "checkpoint", None)
    models = [role for role in roles if role.name in ("policy", "learner")]
    if checkpoint is None or not models:
        return {"outputs": float(LOGS)}
    one, model = checkpoint_bytes(config, roles), float(models[0].models[0].weight_bytes)
    kept = checkpoint.keep + bool(checkpoint.best_metric)
    copies = 1 + bool(checkpoint.best_metric) + (getattr(models[0].placement, "ema_decay", None) is not None)
    return {
        f"{counted(kept, 'checkpoint')} kept": kept * one,
        "one being written": one,
        f"{counted(copies, 'model')} in Hugging Face format": copies * model,
        "metrics, samples, ledger": float(LOGS),
    }
