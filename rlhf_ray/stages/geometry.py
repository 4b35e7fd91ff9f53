"""What a resumed run must have in common with the run that saved (`coordinator.recovery.check_geometry`)."""

from collections.abc import Sequence

from rlhf_ray.config.derived import Derived, needs_reference
from rlhf_ray.config.learner import LoRAConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.coordinator.recovery import Geometry
from rlhf_ray.models.identity import model_identity
from rlhf_ray.stages.supervised_loop import SupervisedConfig

NONE = "none"
READ_BY = ("text", "prompt", "response", "messages", "chosen", "rejected", "margin", "steps", "labels", "system",
           "as_chat")
"""Fields of a section of data that decide what is read from a row."""


def ppo_geometry(config: PPOConfig, derived: Derived) -> Geometry:
    """Values, by field, on which the order of prompts, places in the buffer, trained parameters and ready advantages
    depend, and the frozen models: the reference, and what adapters are added to.

    Raises:
        ModelError: the weights of a model cannot be read.
    """
    critic = config.critic
    named_critic = derived.starts_critic and (critic.path or critic.lora)
    return {
        "run.seed": config.run.seed,
        "prompts.shuffle": config.prompts.shuffle,
        "prompts.held_out": f"{config.prompts.held_out:g}",
        "prompts.mix (weights)": _joined(config.prompts.weights),
        "algorithm.estimator": config.algorithm.estimator.type,
        "coordinator.prompts_per_step": config.coordinator.prompts_per_step,
        "coordinator.samples_per_prompt": config.coordinator.samples_per_prompt,
        "the model at model.path": model_identity(config.model),
        "policy.lora": _adapters(config.policy.lora),
        "critic.backbone": critic.backbone if config.algorithm.has_critic else NONE,
        "the model at critic.path": model_identity(derived.critic_model) if named_critic else NONE,
        "critic.lora": _adapters(critic.lora if derived.starts_critic else None),
        "the model at reference.path": model_identity(derived.reference_model) if config.reference.path else NONE,
        "what needs the reference": needs_reference(config),
    }


def supervised_geometry(config: SupervisedConfig) -> Geometry:
    """Values, by field, on which the trained parameters depend, and which rows an update visits: with others, rows
    would be repeated or missed, and held-out ones trained on. How rows are read belongs to it: another system message
    makes other rows too long, and exchanged columns would undo what was learned.

    Raises:
        ModelError: the weights of the model cannot be read.
    """
    parts = config.data.parts()
    read = {f"data.{field}": ", ".join(str(getattr(part, field)) for part in parts)
            for field in READ_BY if field in type(parts[0]).model_fields}
    steps = getattr(config, "steps", None)
    return {
        "the model at model.path": model_identity(config.model),
        "learner.lora": _adapters(config.learner.lora),
        **read,
        **({} if steps is None else {f"steps.{name}": str(value) for name, value in steps.model_dump().items()}),
        "run.seed": config.run.seed,
        "training.batch_size": config.training.batch_size,
        "data.held_out": f"{config.data.held_out:g}",
        "data.max_tokens": config.data.max_tokens,
        "data.mix (weights)": _joined(config.data.weights),
    }


def _joined(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:g}" for weight in weights)


def _adapters(lora: LoRAConfig | None) -> str:
    """All but the dropout, which only training depends on."""
    return NONE if lora is None else f"rank {lora.rank}, alpha {lora.alpha}, targets {' '.join(sorted(lora.targets))}"
