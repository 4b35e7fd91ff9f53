"""`rlhf-ray export`: a model in Hugging Face format from a checkpoint of a run, in one process, without Ray, vLLM,
DeepSpeed or a GPU. It only reads the run's files, so the run may be stopped, under way, or another user's.

The model has the bits of the run's own export at that step: the same module is built, the same code writes it, and the
checkpoint's format does not depend on ranks or ZeRO stages.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import ValidationError

from rlhf_ray.checkpoint.model_card import ModelCardInfo, card_of, card_of_average
from rlhf_ray.checkpoint.store import Checkpoint, CheckpointStore
from rlhf_ray.config.derived import derive
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig, ProcessRewardConfig, RewardModelConfig, SFTConfig, role_facts
from rlhf_ray.errors import CheckpointError, ConfigError
from rlhf_ray.models.loading import check_model_directory
from rlhf_ray.observability.metrics import metric_rows_from_end
from rlhf_ray.observability.run_directory import RunDirectory, read_json
from rlhf_ray.roles.actor_critic_learner import VALUE_HEAD, ActorCriticLearner, write_value_head
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.roles.supervised_learner import ProcessRewardLearner, RewardModelLearner, SFTLearner

TrainedConfig = SFTConfig | RewardModelConfig | ProcessRewardConfig | PPOConfig
CONFIGS: Mapping[str, type[TrainedConfig]] = {
    role_facts(PPOConfig)["policy"].worker: PPOConfig,
    **{role_facts(cls)["learner"].worker: cls for cls in (SFTConfig, RewardModelConfig, ProcessRewardConfig)},
}
"""Part of a checkpoint whose model is exported -> configuration of the run that writes it."""
_CHECKPOINT = re.compile(r"step_(\d+)")


class Exported(NamedTuple):
    """What was written."""

    step: int
    steps: int
    """All steps of the run."""
    files: dict[str, Path]
    """"model" and, where the run trains them, "adapter", "model_ema" and "value_head"."""


def export_checkpoint(path: Path, step: int | Literal["best"] | None = None, output: Path | None = None,
                      say: Callable[[str], None] = print, repository: str | None = None) -> Exported:
    """Write the model of a checkpoint.

    Args:
        path: a run's directory, or one of its checkpoints.
        step: of the checkpoint; "best" is the one that `checkpoint.best_metric` chose, None the newest intact one.
        output: a new directory for the model; by default `export/step_N` in the run's directory.
        say: receives a line about the checkpoint before its model is loaded, and warnings.
        repository: of the Hub, to which the model is going to be uploaded: its card says how to load it from there.

    Raises:
        ConfigError: the step, the output or the run's configuration cannot be used.
        CheckpointError: there is no such checkpoint, it is damaged, or of another model.
        ModelError: the model that training started from cannot be loaded.
    """
    run, step = _run_and_step(path, step)
    _check_output(output)
    checkpoint = _checkpoint(run, step, say)
    learner_directory = next((checkpoint.path / name for name in CONFIGS if (checkpoint.path / name).is_dir()), None)
    if learner_directory is None:
        raise CheckpointError(f"{checkpoint.path} holds no model: it has none of {', '.join(CONFIGS)}")
    config = _configuration(run, CONFIGS[learner_directory.name])
    place = output or run.exports / checkpoint.path.name
    say(f"step {checkpoint.step} of {config.run.steps}, from {checkpoint.path}")
    if isinstance(config.model, ModelConfig):
        check_model_directory(config.model, "model")
    try:
        card = replace(card_of(config, checkpoint.step, _last_evaluation(run, checkpoint.step)), repository=repository)
        files = _write(config, card, learner_directory, place)
    except OSError as error:
        if not checkpoint.path.exists():
            raise CheckpointError(f"{checkpoint.path} was removed meanwhile: the run goes on, and keeps its newest "
                                  f"checkpoints only (checkpoint.keep); run the command again") from error
        raise ConfigError(f"{place} cannot be written: {error.strerror or error}; name another directory with "
                          "--output") from error
    return Exported(checkpoint.step, config.run.steps, files)


def _write(config: TrainedConfig, card: ModelCardInfo, learner_directory: Path, place: Path) -> dict[str, Path]:
    learner = _learner(config)
    saved = learner.open_saved(learner_directory)
    files = {"model": place}
    learner.export(str(place), card)
    if learner.adapters:
        files["adapter"] = place / "adapter"
        learner.export_adapter(str(files["adapter"]), replace(card, subfolder="adapter"))
    if isinstance(learner, ActorCriticLearner):
        files["value_head"] = place / "value_head" / "value_head.safetensors"  # apart: loaders read *.safetensors
        files["value_head"].parent.mkdir(exist_ok=True)
        write_value_head(saved.whole(VALUE_HEAD), files["value_head"])
    if isinstance(config, PPOConfig) and config.policy.ema_decay is not None:
        files["model_ema"] = place / "model_ema"
        average = saved.average()
        averaged = replace(card_of_average(card, config.policy.ema_decay), subfolder="model_ema")
        learner.whole_model.export(str(files["model_ema"]), averaged, None,
                                   lambda names, wanted: saved.gather_average(average, names, wanted))
    return files


def _learner(config: TrainedConfig) -> Learner:
    """The run's learner as a single rank; the parts of its configuration that only updates use do not matter."""
    common: dict[str, Any] = {"rank": 0, "world": 1, "seed": config.run.seed, "total_steps": 1}
    if isinstance(config, PPOConfig):
        cls = ActorCriticLearner if derive(config).shares_backbone else PolicyLearner
        return cls(config.policy, config.model, algorithm=config.algorithm,
                   temperature=config.generator.sampling.temperature, **common)
    learner: LearnerConfig = config.learner
    common |= {"config": learner, "model": config.model, "batch_size": config.training.batch_size}
    if isinstance(config, RewardModelConfig):
        return RewardModelLearner(new_head=config.training.new_head, **common)
    if isinstance(config, ProcessRewardConfig):
        return ProcessRewardLearner(steps=config.steps, **common)
    return SFTLearner(**common)


def _run_and_step(path: Path, step: int | Literal["best"] | None) -> tuple[RunDirectory, int | Literal["best"] | None]:
    """The run, and the step if `path` is a checkpoint."""
    match = _CHECKPOINT.fullmatch(path.name)
    if not match or path.resolve().parent.name != "checkpoints":
        return RunDirectory(path), step
    if step is not None:
        raise ConfigError(f"{path} is the checkpoint of one step already; leave --step {step} out, or name the run")
    return RunDirectory(path.resolve().parents[1]), int(match[1])


def _check_output(output: Path | None) -> None:
    if output is not None and (output.is_file() or (output.is_dir() and any(output.iterdir()))):
        raise ConfigError(f"--output {output} exists, and is not an empty directory; name a new one")


def _checkpoint(run: RunDirectory, step: int | Literal["best"] | None, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint, verified."""
    store = CheckpointStore(run.checkpoints, keep=1, warn=say)
    there = [number for number, _ in store.steps()]
    if not there:
        raise CheckpointError(_without_checkpoint(run))
    if step == "best":
        best = run.best_step()
        if not best:
            raise ConfigError(f"--step best: {run.path} has no best step; a run with checkpoint.best_metric chooses "
                              f"one. Steps with a checkpoint: {', '.join(map(str, sorted(there)))}")
        step = best
    found = store.latest() if step is None else store.at(step)
    if found is None:
        raise CheckpointError(f"{run.path} has no checkpoint of step {step}; it has those of "
                              f"{', '.join(map(str, sorted(there)))} (checkpoint.every and keep decide which)")
    return found


def _without_checkpoint(run: RunDirectory) -> str:
    if not run.config.is_file():
        below = sorted(str(file.parent.parent) for file in run.path.glob("*/checkpoints/step_*"))
        return (f"{run.path} holds no run; name the directory that a stage writes (its run.dir)"
                + (f", such as {', '.join(dict.fromkeys(below))}" if below else ""))
    ready = f"; its model is {run.model}" if run.model.is_dir() else ""
    return (f"{run.path} has no checkpoint{ready}. A run writes one every checkpoint.every steps, when it is asked to "
            "stop (Ctrl-C), and at its end; the stage `preferences` trains no model")


def _configuration(run: RunDirectory, cls: type[TrainedConfig]) -> TrainedConfig:
    """What the run saved of its configuration; environment variables do not change it."""
    try:
        return cls.model_validate(yaml.safe_load(run.config.read_text()))
    except (OSError, yaml.YAMLError, TypeError, ValidationError) as error:
        raise ConfigError(f"{run.config} cannot be read as the configuration of a {cls.__name__}: {error}. It was "
                          "changed, or written by another version; restore it") from error


def _last_evaluation(run: RunDirectory, step: int) -> dict[str, float]:
    """Metrics of the latest evaluation up to `step`; empty without one."""
    evaluation = read_json(run.evaluation)
    if evaluation and evaluation["step"] <= step:
        return dict(evaluation["after"])
    for row in metric_rows_from_end(run.path):
        if row["step"] <= step and (found := {name.removeprefix("eval/"): value for name, value in row.items()
                                              if name.startswith("eval/")}):
            return found
    return {}
