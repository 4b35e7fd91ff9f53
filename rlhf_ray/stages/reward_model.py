"""`rlhf-ray reward-model`: a scalar reward model trained on preference pairs."""

from typing import Any

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.config.stages import RewardModelConfig
from rlhf_ray.roles.data_readers import DataReader
from rlhf_ray.roles.supervised_learner import RewardModelLearner
from rlhf_ray.stages.supervised_stage import SupervisedStage, check_supervised, run_supervised


def run(config: RewardModelConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage to its end; returns what it wrote to summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    preflight(config)
    return run_supervised(SupervisedStage(
        config=config, name="reward_model", title="reward model", learner=RewardModelLearner, reader=DataReader,
        method="preferences", options={"head_dropout": config.training.head_dropout},
        card=lambda step, metrics: ModelCardInfo(
            stage="reward_model", step=step, base_model=config.model.path,
            trained_on=f"preference pairs in {config.data.title}", metrics=metrics,
        ),
    ), resume)


def preflight(config: RewardModelConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts; raises the same errors as `run`."""
    check_supervised(config, pairs=True)
