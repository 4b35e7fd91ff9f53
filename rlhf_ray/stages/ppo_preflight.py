"""What is checked of a PPO run before anything is started."""

import re
from collections.abc import Set

from rlhf_ray.config.derived import Derived, derive
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.failpoints import armed
from rlhf_ray.models.loading import has_scalar_head
from rlhf_ray.models.model_families import POLICY, Use, check_family
from rlhf_ray.models.router_balance import check_router
from rlhf_ray.roles.engines.vllm_adapter import refuse_open_serialization
from rlhf_ray.stages.environment_preflight import check_environments
from rlhf_ray.stages.ppo_roles import check_pretraining_text
from rlhf_ray.stages.preflight import (
    check_adapters,
    check_context,
    check_data,
    check_engine,
    check_first_rows,
    check_fit,
    check_model,
    check_same_tokens,
    check_stop_tokens,
)
from rlhf_ray.stages.reward_preflight import check_rewards


def preflight(config: PPOConfig, uses: Set[Use] = POLICY) -> None:
    """Refuse what cannot work before anything is started.

    Args:
        uses: of `model`.

    Raises:
        ConfigError, ModelError, DataError: naming the field, the value and the fix.
    """
    refuse_open_serialization()
    armed()  # a misspelled failpoint would never be reached
    check_engine(config.cluster, config.generator)
    check_data(config.prompts)
    derived = derive(config)
    held_out = derived.evaluation_prompts
    if held_out:
        check_data(held_out)
    check_pretraining_text(config)
    check_model(config.model, "model")
    rows = derived.longest_sample, re.sub(r"=\d+", "", derived.longest_sample_field)
    check_family(config.model, "model", uses, rows)
    check_rewards(config, derived)
    check_environments(config)
    check_adapters(config.policy, config.model, "policy", scalar=False)
    check_router(config.model, "policy", config.policy.router_aux_loss_coef)
    if config.reference.path:
        _check_other_model(config, derived, derived.reference_model, "reference")
        check_family(derived.reference_model, "reference", {Use.LANGUAGE}, rows)
    if derived.starts_critic:
        _check_critic(config, derived, rows)
    check_context(config.model, derived.longest_sample, derived.longest_sample_field)
    check_stop_tokens(config.model, config.generator.sampling, "generator.sampling.stop_token_ids")
    if config.evaluation:
        check_stop_tokens(config.model, config.evaluation.sampling, "evaluation.sampling.stop_token_ids")
    check_fit(config)
    for section in filter(None, (config.prompts, held_out, config.ptx)):
        check_first_rows(section, config.model)


def _check_critic(config: PPOConfig, derived: Derived, rows: tuple[int, str]) -> None:
    """Refuse a model that cannot be the critic; `rows` as `longest` of `check_family`."""
    model = derived.critic_model
    if config.critic.path:
        _check_other_model(config, derived, model, "critic")
        has_scalar_head(model, "critic")
    check_family(model, "critic" if config.critic.path else f"critic.init={config.critic.init}", {Use.SCALAR}, rows)
    check_adapters(config.critic, model, "critic", scalar=True)
    check_router(model, "critic", config.critic.router_aux_loss_coef)


def _check_other_model(config: PPOConfig, derived: Derived, model: ModelConfig, section: str) -> None:
    """Refuse a model that cannot read the policy's rows: it does not exist, has another tokenizer or fewer embeddings,
    or a shorter context."""
    check_model(model, section)
    check_same_tokens(config.model, model, ("model", f"{section}.path"),
                      f"Leave {section}.path empty, or name a model with the policy's tokenizer.")
    check_context(model, derived.longest_sample, derived.longest_sample_field)
