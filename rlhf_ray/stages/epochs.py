"""`run.epochs`: the number of updates that follows from the number of training rows."""

from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

from rlhf_ray.config.load import resolve
from rlhf_ray.config.stages import PPOConfig, StageConfig
from rlhf_ray.roles.data_readers import DataReader, DataSummary, PromptReader
from rlhf_ray.stages.supervised_loop import SupervisedConfig

C = TypeVar("C", bound=StageConfig)


def with_steps(config: C, count: Callable[[], int], rows_per_step: int) -> C:
    """The configuration with `run.steps` in place of `run.epochs`: as many updates as the rows of all epochs fill, the
    last one perhaps with rows of a further epoch. A configuration without `run.epochs` stays as it is.

    Args:
        count: returns the number of training rows.
        rows_per_step: rows of an update.

    Raises:
        ConfigError: other settings do not fit the number of steps.
    """
    epochs = config.run.epochs
    if epochs is None:
        return config
    steps = max(1, ceil(round(epochs * count() / rows_per_step, 6)))  # rounded: 0.1 * 30 is a little more than 3
    return resolve(config.model_copy(update={"run": config.run.model_copy(update={"steps": steps, "epochs": None})}))


def count_prompts(config: PPOConfig) -> int:
    """Number of training prompts of all data sets, without held-out ones and those that are too long.

    Raises:
        DataError, ModelError: they cannot be read.
    """
    reader = PromptReader(config.model)
    reader.start()
    return int(sum(reader.open("training", config.prompts)["sizes"]))


def count_rows(config: SupervisedConfig, read: Callable[..., tuple[Any, Any, DataSummary]],
               reading: tuple[Any, ...]) -> int:
    """Number of training rows of a supervised stage, as `count_prompts`.

    Args:
        read, reading: see `SupervisedStage`.
    """
    role = DataReader(config.model)
    role.start()
    return read(role, config.data, *reading)[2].rows
