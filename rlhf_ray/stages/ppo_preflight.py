"""What is checked of a PPO run before anything is started."""

from rlhf_ray.config.derived import derive
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.failpoints import armed
from rlhf_ray.models.model_families import POLICY, Use, check_family
from rlhf_ray.roles.engines.vllm_adapter import refuse_open_serialization
from rlhf_ray.stages.ppo_roles import check_pretraining_text
from rlhf_ray.stages.preflight import (
    check_adapters,
    check_context,
    check_data,
    check_data_file,
    check_first_rows,
    check_fit,
    check_model,
    check_stop_tokens,
)
from rlhf_ray.stages.reward_preflight import check_rewards


def preflight(config: PPOConfig) -> None:
    """Refuse what cannot work before anything is started.

    Raises:
        ConfigError, ModelError, DataError: naming the field, the value and the fix.
    """
    refuse_open_serialization()
    armed()  # a misspelled failpoint would never be reached
    check_data(config.prompts, "prompts")
    derived = derive(config)
    held_out = derived.evaluation_prompts
    if held_out:
        check_data_file(held_out.location, "evaluation.prompts")
    check_pretraining_text(config)
    check_model(config.model, "model")
    longest, field = derived.longest_response, derived.longest_response_field
    rows = derived.longest_sample, f"prompts.max_tokens + {field}"
    check_family(config.model, "model", POLICY, rows)
    check_rewards(config)
    check_adapters(config.policy, config.model, "policy", scalar=False)
    if derived.starts_critic:
        check_family(derived.critic_model, f"critic.init={config.critic.init}", {Use.SCALAR}, rows)
        check_adapters(config.critic, derived.critic_model, "critic", scalar=True)
    check_context(config.model, config.prompts.max_tokens, longest, ("prompts.max_tokens", field))
    check_stop_tokens(config.model, config.generator.sampling, "generator.sampling.stop_token_ids")
    if config.evaluation:
        check_stop_tokens(config.model, config.evaluation.sampling, "evaluation.sampling.stop_token_ids")
    check_fit(config)
    for section in (config.prompts, held_out) if held_out else (config.prompts,):
        check_first_rows(section, config.model)
