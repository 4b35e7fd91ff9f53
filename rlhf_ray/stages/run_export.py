"""Exports of trained models to the run's directory: model/, adapter/ and, for PPO, value head and average."""

from dataclasses import replace
from pathlib import Path

from rlhf_ray.checkpoint.model_card import ModelCardInfo, card_of, card_of_average
from rlhf_ray.config.learner import LearnerConfig
from rlhf_ray.coordinator.loop import Coordinator
from rlhf_ray.observability.owner_record import Term
from rlhf_ray.observability.run_directory import RunDirectory
from rlhf_ray.roles.actor_critic_learner import ActorCriticLearner
from rlhf_ray.roles.learner import Learner
from rlhf_ray.roles.policy_learner import PolicyLearner
from rlhf_ray.stages.evaluation_log import EvaluationLog
from rlhf_ray.workers.worker_group import WorkerGroup


async def export_learner(
    learners: WorkerGroup[Learner], config: LearnerConfig, directory: RunDirectory, card: ModelCardInfo
) -> None:
    """Write model/ in Hugging Face format with adapters merged, and adapter/ in peft's format when adapters were
    trained."""
    await learners.values(Learner.export, str(directory.model.absolute()), card, directory.term)
    if config.lora:
        await learners.values(Learner.export_adapter, str(directory.adapter.absolute()), card, directory.term)


async def export_run(coordinator: Coordinator, evaluations: EvaluationLog, directory: RunDirectory) -> None:
    """Write model/ and, where the run has them, adapter/, value_head.safetensors and model_ema/."""
    config = coordinator.config
    policy = coordinator.roles.policy
    await export_learner(policy, config.policy, directory, _card(coordinator, evaluations))
    if coordinator.derived.shares_backbone:
        await coordinator.roles.actor_critic.values(
            ActorCriticLearner.export_value_head, str(directory.value_head.absolute()), directory.term)
    if config.policy.ema_decay is not None:
        card = card_of_average(_card(coordinator, evaluations), config.policy.ema_decay)
        await policy.values(PolicyLearner.export_average, str(directory.model_ema.absolute()), card, directory.term)


async def export_policy(
    coordinator: Coordinator, evaluations: EvaluationLog, place: Path, term: Term | None
) -> None:
    """Write the present policy to the directory `place` of the run; `term` is the writer's ownership term."""
    card = _card(coordinator, evaluations)
    await coordinator.roles.policy.values(PolicyLearner.export, str(place.absolute()), card, term)


def _card(coordinator: Coordinator, evaluations: EvaluationLog) -> ModelCardInfo:
    return replace(card_of(coordinator.config, coordinator.state.step, evaluations.last()),
                   chat=coordinator.pipeline.chat)
