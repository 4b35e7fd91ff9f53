"""What a finished learner leaves behind: model/, and adapter/ where adapters were trained."""

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.cluster.group import WorkerGroup
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.observability.run_directory import RunDirectory


async def export_learner(
    learners: WorkerGroup, config: LearnerConfig, directory: RunDirectory, card: ModelCardInfo
) -> None:
    """Write model/ in Hugging Face format, adapters merged; and the adapters alone in peft's format, if there are."""
    await learners.values("export", str(directory.model.absolute()), card, directory.term)
    if config.lora:
        await learners.values("export_adapter", str(directory.adapter.absolute()), card, directory.term)
