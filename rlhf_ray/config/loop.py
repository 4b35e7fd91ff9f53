"""The loop: batches, the replay buffer, checkpoints, evaluation, what is written where."""

from typing import Literal

from pydantic import Field

from rlhf_ray.config.base import Section


class CoordinatorConfig(Section):
    """How experience flows."""

    prompts_per_step: int = Field(128, ge=1)
    """Prompts of one update."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses per prompt."""
    max_staleness: int = Field(0, ge=0)
    """η: no token older than η versions is trained on; 0 is synchronous PPO, more overlaps rollouts and updates."""


class BufferConfig(Section):
    """The replay buffer: references to experience in Ray's object store."""

    capacity_samples: int | None = Field(None, ge=1)
    """Most samples held or reserved; (max_staleness + 1) steps' worth when empty."""
    capacity_mb: int | None = Field(None, ge=1)
    """Most MiB of experience held; when empty, half a local cluster's object store, no bound on a joined one."""
    lease_timeout_s: float = Field(3600.0, gt=0)
    """A lease not acknowledged within this time comes back."""


class CheckpointConfig(Section):
    """When to save, and how many to keep."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep."""


class EvaluationConfig(Section):
    """Measuring the policy on prompts it never trained on, with the same seeds every time."""

    prompts: str
    """jsonl, parquet or csv file, or a Hub data set name."""
    split: str = "train"
    """Split of a Hub data set; name one that training does not read."""
    column: str = "prompt"
    """Column that holds the prompt."""
    limit: int | None = Field(512, ge=1)
    """Use the first rows only."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before the first step and after the last only."""
    seed: int = Field(12345, ge=0, lt=2**31)
    """Seed of the evaluation's sampling."""


class LoggingConfig(Section):
    """Where numbers and texts go, beside metrics.jsonl which is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/."""
    ray_metrics: bool = True
    """Export gauges to Ray's Prometheus endpoint."""
    wandb_project: str | None = None
    """Weights & Biases project; off when empty."""
    samples_per_step: int = Field(4, ge=0)
    """Rollouts saved as text per step, in samples/."""
    judge: Literal["vader"] | None = None
    """Independent judge that scores responses beside the reward model (the "gold" score); never trained on."""
