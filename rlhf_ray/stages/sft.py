"""`rlhf-ray sft`: supervised fine-tuning on demonstrations."""

from typing import Any

import yaml
from pydantic import ValidationError

from rlhf_ray.config.combination_checks import check_combinations
from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.data.found_columns import with_found_columns
from rlhf_ray.roles.data_readers import DataReader
from rlhf_ray.roles.supervised_learner import SFTLearner
from rlhf_ray.stages.preflight import former_config, with_gpu_settings
from rlhf_ray.stages.supervised_stage import SupervisedStage, check_supervised, run_supervised


def run(config: SFTConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage to its end; returns what it wrote to summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    config = with_gpu_settings(config, resume)
    preflight(config)
    config = with_columns(config, resume)
    return run_supervised(SupervisedStage(
        config=config, name="sft", title="SFT", learner=SFTLearner, read=DataReader.demonstrations,
    ), resume)


def with_columns(config: SFTConfig, resume: bool) -> SFTConfig:
    """The configuration with names of all columns, so that the run saves them. A resumed run has those that it saved,
    unless others are set now.

    Raises:
        ConfigError: another setting has no effect on the format that is found.
        DataError: see `with_found_columns`.
    """
    if all(part.names_all_columns for part in config.data.parts()):
        return config
    data = _with_saved_columns(config) if resume else config.data
    config = config.model_copy(update={"data": with_found_columns(data)})
    check_combinations(config)
    return config


def _with_saved_columns(config: SFTConfig) -> DemonstrationsConfig:
    """The section `data` with the columns that the resumed run saved for the same data sets."""
    text = former_config(config)
    try:
        former = SFTConfig.model_validate(yaml.safe_load(text or "")).data
    except (yaml.YAMLError, ValidationError):  # without a run, or one of another kind
        return config.data
    parts, saved = config.data.parts(), former.parts()
    if [part.location for part in parts] != [part.location for part in saved]:
        return config.data
    columns = [old.named_columns if new.named_columns.items() <= old.named_columns.items() else {}
               for new, old in zip(parts, saved, strict=True)]
    if not config.data.mix:
        return config.data.model_copy(update=columns[0])
    mix = [source.model_copy(update=each) for source, each in zip(config.data.mix, columns, strict=True)]
    return config.data.model_copy(update={"mix": mix})


def preflight(config: SFTConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts; raises the same errors as `run`."""
    check_supervised(config)
