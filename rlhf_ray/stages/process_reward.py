"""`rlhf-ray process-reward`: a process reward model trained on solutions with labelled steps."""

from typing import Any

from rlhf_ray.config.stages import ProcessRewardConfig
from rlhf_ray.observability.start_phases import START
from rlhf_ray.roles.data_readers import DataReader
from rlhf_ray.roles.supervised_learner import ProcessRewardLearner
from rlhf_ray.stages.preflight import with_gpu_settings
from rlhf_ray.stages.supervised_stage import SupervisedStage, check_supervised, run_supervised


def run(config: ProcessRewardConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage to its end; returns what it wrote to summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    config = with_gpu_settings(config, resume)
    START.begin("checks", "checking the configuration, models and data")
    preflight(config)
    return run_supervised(SupervisedStage(
        config=config, name="process_reward", title="process reward model", learner=ProcessRewardLearner,
        read=DataReader.process_rows, reading=(config.steps,), options={"steps": config.steps},
    ), resume)


def preflight(config: ProcessRewardConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts; raises the same errors as `run`."""
    check_supervised(config, steps=config.steps)
