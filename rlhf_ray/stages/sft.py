"""`rlhf-ray sft`: supervised fine-tuning on demonstrations."""

from typing import Any

from rlhf_ray.config.stages import SFTConfig
from rlhf_ray.roles.data_readers import DataReader
from rlhf_ray.roles.supervised_learner import SFTLearner
from rlhf_ray.stages.preflight import with_gpu_settings
from rlhf_ray.stages.supervised_stage import SupervisedStage, check_supervised, run_supervised


def run(config: SFTConfig, resume: bool = False) -> dict[str, Any]:
    """Run the stage to its end; returns what it wrote to summary.json.

    Raises:
        RLHFError: the command failed; the message says what to do.
    """
    config = with_gpu_settings(config, resume)
    preflight(config)
    return run_supervised(SupervisedStage(
        config=config, name="sft", title="SFT", learner=SFTLearner, read=DataReader.demonstrations,
    ), resume)


def preflight(config: SFTConfig) -> None:
    """Refuse a configuration that cannot work, before anything starts; raises the same errors as `run`."""
    check_supervised(config)
