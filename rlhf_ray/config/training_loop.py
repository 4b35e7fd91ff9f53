"""The loop: batches, the replay buffer, checkpoints, evaluation, what is written where."""

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.section import Section


class CoordinatorConfig(Section):
    """How experience flows."""

    prompts_per_step: int = Field(128, ge=1)
    """Prompts of one update."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses per prompt."""
    max_staleness: int = Field(0, ge=0)
    """η: no token older than η versions is trained on; 0 is synchronous PPO, more overlaps rollouts and updates."""
    concurrency: int | None = Field(None, ge=1)
    """Most samples with the generators at a time; when empty, twice what they decode side by side
    (generator.max_sequences), and two chunks each at least."""


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
    best_metric: str | None = None
    """Held-out metric (reward, gold, loss, accuracy, ...) by which the best step is told: its checkpoint is kept
    beside the newest, its model exported to best/; off when empty."""
    best_mode: Literal["max", "min"] | None = None
    """Which way `best_metric` is better; when empty, min for losses, perplexity and KL, max for all others."""

    @model_validator(mode="before")
    @classmethod
    def _settle_best(cls, given: Any) -> Any:
        """Settle the direction, so that the saved configuration names it."""
        metric = given.get("best_metric") if isinstance(given, dict) else None
        if not isinstance(metric, str):
            return given
        name = metric.removeprefix("eval/")
        lower = {"loss", "perplexity", "kl"} & set(re.split(r"[/_]", name))
        return {**given, "best_metric": name, "best_mode": given.get("best_mode") or ("min" if lower else "max")}

    @model_validator(mode="after")
    def _mode_of_what(self) -> Self:
        if self.best_mode and not self.best_metric:
            raise ValueError(f"best_mode={self.best_mode} without best_metric; name the metric, e.g. reward")
        return self


class EarlyStopConfig(Section):
    """Ending a run that went wrong: its KL blew up, or its reward collapsed, for several steps in a row."""

    kl_above: float | None = Field(None, gt=0)
    """Stop when the mean sequence KL from the reference (`kl/sequence`, in nats) is above this; off when empty."""
    reward_below_start: float | None = Field(None, ge=0)
    """Stop when the mean reward (`reward/mean`) is more than this below its mean over the run's first `patience`
    steps; off when empty."""
    patience: int = Field(5, ge=1)
    """Steps in a row that must be over a limit."""


class EvaluationConfig(Section):
    """Measuring the policy on prompts it never trained on, with the same seeds every time."""

    prompts: str | None = None
    """jsonl, parquet or csv file, or a Hub data set name; the rows of `prompts.held_out` when empty."""
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
    sampling: SamplingConfig | None = None
    """How held-out responses are drawn, greedy and truncated distributions allowed. Fields that are not given are as in
    training (generator.sampling), all of them when this is empty."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses to each held-out prompt; pass@k of verifiable rewards is told for k = 1, 2, 4, ... up to this."""
    solved_at: float | None = None
    """Score from which on a response counts as solved by a function or service, for their pass@k; verifiable rewards
    need none, they count what scores `right`."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples_per_prompt > 1 and self.sampling and self.sampling.temperature == 0:
            raise ValueError(f"samples_per_prompt={self.samples_per_prompt} with sampling.temperature=0 draws the same "
                             "response each time; use one sample, or a positive temperature")
        return self


class LoggingConfig(Section):
    """Where numbers and texts go, beside metrics.jsonl which is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/."""
    ray_metrics: bool = True
    """Export gauges to Ray's Prometheus endpoint: every row's numbers, and who is busy every two seconds."""
    task_events: bool = False
    """Let Ray keep a record of every call, for its dashboard's task view and `ray timeline`."""
    wandb_project: str | None = None
    """Weights & Biases project; off when empty."""
    mlflow_experiment: str | None = None
    """MLflow experiment, at MLFLOW_TRACKING_URI or in a file of the run's directory; off when empty."""
    samples_per_step: int = Field(4, ge=0)
    """Rollouts saved as text per step, in samples/."""
    profile_step: int | None = Field(None, ge=1)
    """Step to profile, as `rlhf-ray profile` does for a run that is going on; off when empty."""
    judge: Literal["vader"] | None = None
    """Independent judge that scores responses beside the reward model (the "gold" score); never trained on."""
