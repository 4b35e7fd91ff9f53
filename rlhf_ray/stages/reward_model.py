"""`rlhf-ray reward-model`: a scalar reward model trained on preference pairs."""

from typing import Any

from rlhf_ray.config.stages import RewardModelConfig
from rlhf_ray.models.loading import has_scalar_head, pads_with_end
from rlhf_ray.observability.start_phases import START
from rlhf_ray.roles.data_readers import DataReader
from rlhf_ray.roles.supervised_learner import RewardModelLearner
from rlhf_ray.stages.preflight import with_gpu_settings
from rlhf_ray.stages.supervised_stage import SupervisedStage, check_supervised, run_supervised


def run(config: RewardModelConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage to its end; returns what it wrote to summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    config = with_gpu_settings(config, resume)
    START.begin("checks", "checking the configuration, models and data")
    preflight(config)
    training, kept = config.training, _keeps_head(config)
    return run_supervised(SupervisedStage(
        config=config, name="reward_model", title="reward model", learner=RewardModelLearner,
        read=DataReader.preferences, options={"head_dropout": training.head_dropout, "new_head": training.new_head},
        start=_start_in_words(config, kept), measured_first=kept,
    ), resume)


def preflight(config: RewardModelConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts; raises the same errors as `run`."""
    check_supervised(config, pairs=True)
    _keeps_head(config)


def _keeps_head(config: RewardModelConfig) -> bool:
    """Whether training continues with the head of the model that it starts from.

    Raises:
        ModelError: the model is a classifier with several labels, whose head cannot be kept.
    """
    return not config.training.new_head and has_scalar_head(
        config.model, "model", need="a reward model has one score",
        remedy=", or set training.new_head=true to replace its head")


def _start_in_words(config: RewardModelConfig, kept: bool) -> str:
    """A sentence about the head that training starts with."""
    path = config.model.path
    if not kept:
        return f"the scalar head is new; {path} gives the other weights"
    note = f"the scalar head is that of {path} (training.new_head=true starts with a new one)"
    if pads_with_end(config.model):
        note += ("; the padding token of that model is its end token, so transformers has scored it at the token "
                 "before the end, and training scores the end")
    return note
