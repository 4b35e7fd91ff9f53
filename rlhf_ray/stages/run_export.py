"""Exports of trained models to the run's directory: model/, adapter/ and, for PPO, value head and average."""

from dataclasses import replace
from pathlib import Path

from rlhf_ray.checkpoint.model_card import ModelCardInfo
from rlhf_ray.cluster.worker_group import WorkerGroup
from rlhf_ray.config.derived import derive, reference_in_words
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.config.rewards import rewards_in_words
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.stages.evaluation_log import EvaluationLog


async def export_learner(
    learners: WorkerGroup, config: LearnerConfig, directory: RunDirectory, card: ModelCardInfo
) -> None:
    """Write model/ in Hugging Face format with adapters merged, and adapter/ in peft's format when adapters were
    trained."""
    await learners.values("export", str(directory.model.absolute()), card, directory.term)
    if config.lora:
        await learners.values("export_adapter", str(directory.adapter.absolute()), card, directory.term)


async def export_run(coordinator: Coordinator, evaluations: EvaluationLog, directory: RunDirectory) -> None:
    """Write model/ and, where the run has them, adapter/, value_head.safetensors and model_ema/."""
    config, policy = coordinator.config, coordinator.roles.policy
    await export_learner(policy, config.policy, directory, _card(coordinator, evaluations))
    if derive(config).shares_backbone:
        await policy.values("export_value_head", str(directory.value_head.absolute()), directory.term)
    if config.policy.ema_decay is not None:
        card = replace(_card(coordinator, evaluations), metrics={}, weights="exponential moving average, decay "
                       f"{config.policy.ema_decay:g} an optimizer step; not evaluated separately")
        await policy.values("export_average", str(directory.model_ema.absolute()), card, directory.term)


async def export_policy(
    coordinator: Coordinator, evaluations: EvaluationLog, place: Path, term: Term | None
) -> None:
    """Write the present policy to the directory `place` of the run; `term` is the writer's ownership term."""
    await coordinator.roles.policy.values("export", str(place.absolute()), _card(coordinator, evaluations), term)


def _card(coordinator: Coordinator, evaluations: EvaluationLog) -> ModelCardInfo:
    config = coordinator.config
    text = f", and text in {config.ptx.title}" if config.ptx else ""
    derived, others = derive(config), {"Reference, from which the KL is measured": reference_in_words(config)}
    if derived.starts_critic:
        others["Critic, started from"] = derived.critic_model.path
    return ModelCardInfo(
        stage="ppo", step=coordinator.state.step, base_model=config.model.path,
        trained_on=f"prompts in {config.prompts.title}{text}",
        rewards=rewards_in_words({name: reward.model_dump() for name, reward in config.rewards.items()}),
        other_models=others, metrics=evaluations.last(), chat=coordinator.pipeline.chat,
    )
