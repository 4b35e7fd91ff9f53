"""The training loop: batches, replay buffer, checkpoints, evaluation and logging."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlhf_ray.config.data import NumberedRows, PromptsSource
from rlhf_ray.config.generation import SamplingConfig
from rlhf_ray.config.given_objects import DataPath
from rlhf_ray.config.paths import UserPath
from rlhf_ray.config.section import Section

MAX_PATIENCE = 100
"""Longest `early_stop.patience`, in steps: so many of a run's metrics are in its checkpoints."""


class CoordinatorConfig(Section):
    """Batch size, staleness and concurrency of the loop."""

    prompts_per_step: int = Field(128, ge=1)
    """Prompts of one update."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses per prompt. Unless set, 8 with an estimator that compares them (reinforce_baseline, grpo, dr_grpo,
    gdpo), and 4 with rloo, as in the commands `grpo` and `rloo`."""
    max_staleness: int = Field(0, ge=0)
    """η: no token older than η versions is trained on. 0 is synchronous PPO; higher values overlap rollouts and
    updates."""
    concurrency: int | None = Field(None, ge=1)
    """Maximum number of samples in flight at the generators; if empty, twice as many as they decode in parallel
    (generator.max_sequences), and at least two chunks each."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one update."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_ahead(self) -> int:
        """Maximum number of samples under way or waiting for the learners."""
        return (self.max_staleness + 1) * self.samples_per_step


class GRPOGroups(CoordinatorConfig):
    """As `CoordinatorConfig`, with GRPO's groups."""

    samples_per_prompt: int = Field(8, ge=1)
    """Responses per prompt (8 in TRL; DeepSeekMath: 64)."""


class RLOOGroups(CoordinatorConfig):
    """As `CoordinatorConfig`, with RLOO's groups."""

    samples_per_prompt: int = Field(4, ge=1)
    """Responses per prompt (2 and 4 in Ahmadian et al. 2024)."""


class BufferConfig(Section):
    """The replay buffer: references to experience in Ray's object store, of at most max_staleness + 1 steps."""

    capacity_mb: int | None = Field(None, ge=1)
    """Maximum MiB of experience held; if empty, half of a local cluster's object store, and no bound on a joined
    one."""


class CheckpointConfig(Section):
    """When to save checkpoints, and how many to keep."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves only by time (`every_minutes`) and at the end."""
    every_minutes: float = Field(10.0, ge=0)
    """Minutes between checkpoints, besides those of `every`; 0 is off. They are at least 20 times as long as the last
    checkpoint took to copy and write, so that checkpoints take at most 5 % of the time."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    best_metric: str | None = None
    """Held-out metric (reward, gold, loss, accuracy, ...) that selects the best step: its checkpoint is kept in
    addition to the newest, and its model exported to best/. Off if empty."""
    best_mode: Literal["max", "min"] | None = None
    """Whether a lower or a higher `best_metric` is better; if empty, min for losses, perplexity and KL, max for
    others."""

    @model_validator(mode="before")
    @classmethod
    def _settle_best(cls, given: Any) -> Any:
        """Fill in best_mode, so that the saved configuration contains it."""
        metric = given.get("best_metric") if isinstance(given, dict) else None
        if not isinstance(metric, str):
            return given
        name = metric.removeprefix("eval/")
        lower = {"loss", "perplexity", "kl"} & set(re.split(r"[/_]", name))
        return {**given, "best_metric": name, "best_mode": given.get("best_mode") or ("min" if lower else "max")}


class EarlyStopConfig(Section):
    """Ends a run whose KL is too high, or whose reward collapsed, for several consecutive steps."""

    kl_above: float | None = Field(None, gt=0)
    """Stop when the mean sequence KL from the reference (`kl/sequence`, in nats) is above this; off if empty."""
    reward_below_start: float | None = Field(None, ge=0)
    """Stop when the mean reward (`reward/mean`) is more than this below its mean over the run's first `patience`
    steps; off if empty."""
    patience: int = Field(5, ge=1, le=MAX_PATIENCE)
    """Number of consecutive steps beyond a limit that end the run."""


class EvaluationConfig(Section):
    """Evaluates the policy on held-out prompts, with the same seeds every time."""

    prompts: DataPath | None = None
    """jsonl, parquet or csv file, a pattern such as data/*.jsonl, a directory saved by `datasets`, or a Hub data set
    name; the rows of `prompts.held_out` if this, `numbered` and `mix` are empty."""
    numbered: NumberedRows | None = None
    """Rows without texts, in place of `prompts`, for environments that give the first message themselves."""
    mix: list[PromptsSource] = Field(default_factory=list)
    """Several data sets in place of `prompts`; every row of each is used once."""
    subset: str | None = None
    """Subset (configuration) of a Hub data set."""
    revision: str | None = None
    """Revision of a Hub data set (branch, tag or commit); the newest if empty."""
    split: str | None = None
    """Split of `prompts` (or of each data set of `mix`) whose rows are the held-out prompts, where that is a Hub data
    set, or a directory saved by `datasets` that has several; if empty `test`, as TRL's `dataset_test_split`. Files have
    no splits, and the rows of `prompts.held_out` are of the training split."""
    column: str = "prompt"
    """Column that holds the prompt."""
    limit: int | None = Field(512, ge=1)
    """Use only the first rows (of each data set of a mix)."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    seed: int = Field(12345, ge=0, lt=2**31)
    """Seed of the evaluation's sampling."""
    sampling: SamplingConfig | None = None
    """How held-out responses are sampled; greedy and truncated distributions are allowed. Fields that are not set are
    taken from training (generator.sampling)."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses per held-out prompt; pass@k of verifiable rewards is reported for k = 1, 2, 4, ... up to this."""
    solved_at: float | None = None
    """Minimum score at which a response counts as solved, for pass@k of function and HTTP rewards. Verifiable rewards
    use their `right` score."""

    @property
    def has_data(self) -> bool:
        """Whether it names data of its own; otherwise its prompts are held out of training."""
        return self.prompts is not None or self.numbered is not None or bool(self.mix)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("prompts", "numbered", "mix") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are set; keep one")
        return self


def _saved_samples(value: Any) -> Any:
    """A number of prompts, "all" or "off".

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value in ("all", "off") or (isinstance(value, int) and value is not True and value >= 1):
        return value
    raise ValueError(f"{value!r} is none of all, off, and a number of prompts of each step, from 1 on")


TrackerName = Literal["wandb", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab"]
"""The trackers of `accelerate.tracking` apart from TensorBoard, each by its name there, which is its package's."""


def _names_once(value: Any) -> Any:
    """Each name once, from a list or from a text with commas between names.

    Raises:
        ValueError: TensorBoard is among them.
    """
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list):
        return names
    if "tensorboard" in names:
        raise ValueError("tensorboard has a field of its own; leave it out, and set logging.tensorboard (on by "
                         "default)")
    return [name for at, name in enumerate(names) if name not in names[:at]]


class LoggingConfig(Section):
    """Destinations of metrics and texts, in addition to metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/."""
    ray_metrics: bool = True
    """Export gauges to Ray's Prometheus endpoint: the metrics of every step, and every two seconds which roles are
    busy."""
    task_events: bool = False
    """Let Ray record every call, for its dashboard's task view and `ray timeline`."""
    trackers: Annotated[list[TrackerName], BeforeValidator(_names_once)] = Field(default_factory=list)
    """Services that get the metrics and the configuration; wandb and trackio also a table of samples."""
    project: str = Field("rlhf_ray", min_length=1)
    """Project of the run in its trackers; in MLflow its experiment."""
    run_name: str | None = Field(None, min_length=1)
    """Name of the run in its trackers; if empty, that of its directory."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run in its trackers."""
    samples: Annotated[Literal["all", "off"] | int, BeforeValidator(_saved_samples)] = "all"
    """Samples of each step that are saved in samples/, with texts, tokens, log-probabilities, advantages and rewards:
    `all`, those of the step's first N prompts (a number), or `off`."""
    profile_step: int | None = Field(None, ge=1)
    """Step to profile, as `rlhf-ray profile` does for a running run; off if empty."""
    judge: UserPath | None = Field(None, min_length=1)
    """Independent judge that also scores responses (the "gold" score), and is never trained on: a scorer as in
    `compare --scorer` (vader, a reward model, exact_match, number, file.py:function, the address of a service, a .yaml
    file with `rewards`)."""
