"""Checks of `rewards` before Ray starts."""

import asyncio
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.derived import derive, judge_rewards, reward_sections
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import (
    FunctionReward,
    HTTPReward,
    JSONSchemaReward,
    ModelReward,
    ProcessReward,
    RegexReward,
    RewardConfig,
)
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.row_readers import READERS, read_rows
from rlhf_ray.data.stepwise_format import StepTokens, load_steps
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import ConfigError, ModelError, RewardError
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import check_scalar_head, load_tokenizer
from rlhf_ray.models.model_families import Use, check_family, is_decoder
from rlhf_ray.rewards.http.source import HTTPSource
from rlhf_ray.rewards.sources import make_source
from rlhf_ray.stages.preflight import FIRST_ROWS, check_context, check_model, check_same_tokens
from rlhf_ray.stages.scorers import AnswerCheck, check_scorer


def check_rewards(config: PPOConfig) -> None:
    """Refuse rewards that cannot work, and a critic that cannot be initialised from one.

    Raises:
        ModelError, ConfigError, DataError: naming the component and the fix.
    """
    sections = [config.prompts, derive(config).evaluation_prompts]
    for name, reward in config.rewards.items():
        _check_source(config, name, reward)
        check_prompt_answers(sections, config.model, f"rewards.{name}", name, reward)
    if config.logging.judge is not None:
        check_scorer(config.logging.judge, config.model, "logging.judge")
        for name, reward in judge_rewards(config).items():
            check_prompt_answers(sections, config.model, f"logging.judge ({name})", name, reward)
    if config.reward.shards > 1:
        for field, reward in reward_sections(config).items():
            if isinstance(reward, ModelReward):
                _check_decoder(reward, field, config.reward.shards)
    derived = derive(config)
    if derived.starts_critic and config.critic.init == "reward":
        _refuse_labelled_critic(config)
        check_same_tokens(config.model, derived.critic_model,
                          ("model", "rewards, from which critic.init=reward starts"))


def _refuse_labelled_critic(config: PPOConfig) -> None:
    """A critic has one output, and cannot start from a head with several labels."""
    for name, reward in config.rewards.items():
        if isinstance(reward, ModelReward) and (reward.label is not None or reward.value == "probability"):
            field = "label" if reward.label is not None else "value"
            raise ConfigError(f"critic.init=reward starts the critic's value head from rewards.{name}, whose reward is "
                              f"not the head's only output (rewards.{name}.{field}={getattr(reward, field)!r}); set "
                              "critic.init=policy")


def _check_source(config: PPOConfig, name: str, reward: RewardConfig) -> None:
    match reward:
        case ModelReward():
            _check_reward_model(config, name, reward)
        case ProcessReward():
            check_model(reward, f"rewards.{name}")
            check_family(reward, f"rewards.{name}", {Use.LANGUAGE})
            StepTokens.of(load_steps(reward, f"rewards.{name}"), load_tokenizer(reward))
        case HTTPReward():
            digest = tokenizer_digest(load_tokenizer(config.model))
            asyncio.run(_reward_errors_as_config(HTTPSource(name, reward).check(digest)))
        case FunctionReward() | RegexReward() | JSONSchemaReward():
            asyncio.run(_reward_errors_as_config(_try_start(config, name, reward)))


def _check_reward_model(config: PPOConfig, name: str, reward: ModelReward) -> None:
    """A model with another tokenizer reads texts, whose length it counts itself; the length for one with our tokenizer
    is checked here."""
    field = f"rewards.{name}"
    check_model(reward, field, require_eos=False)
    check_scalar_head(reward, field, reward.label)
    if tokenizer_digest(load_tokenizer(config.model)) == tokenizer_digest(load_tokenizer(reward, require_eos=False)):
        check_context(reward, config.prompts.max_tokens, config.generator.sampling.max_tokens,
                      ("prompts.max_tokens", "generator.sampling.max_tokens"))


def _check_decoder(reward: ModelReward, field: str, shards: int) -> None:
    """Refuse to shard an encoder, whose passes the ranks do not make together."""
    if not is_decoder(shape := pretrained_config(reward)):
        raise ModelError(f"{field}.path={reward.path!r} is of the family {shape.model_type!r}, which is no decoder, "
                         f"and reward.shards={shards} divides decoders only: set reward.shards to 1, or use a decoder")


async def _try_start(config: PPOConfig, name: str, reward: RewardConfig) -> None:
    """Start the source here, as the reward scorer will do."""
    source = make_source(name, reward, config.model, config.reward.micro_batch_tokens)
    try:
        await source.start()
    finally:
        await source.stop()


async def _reward_errors_as_config(check: Coroutine[Any, Any, None]) -> None:
    """A reward that cannot work from the start is an error of the configuration."""
    try:
        await check
    except RewardError as error:
        raise ConfigError(str(error)) from None


def check_prompt_answers(sections: Iterable[PromptsConfig | None], model: ModelConfig, section: str, name: str,
                         reward: RewardConfig) -> None:
    """Check the first rows of local files of prompts for the columns that a reward reads, and for answers that a
    response can be compared with.

    Args:
        section: names the reward in messages.

    Raises:
        DataError: names the row.
    """
    check = AnswerCheck(section, name, reward, model)
    for field, part in (named for prompts in sections if prompts for named in prompts.named_parts()):
        if not check.columns or Path(part.location).suffix.lower() not in READERS:
            continue
        rows = read_rows(part.location, part.split, min(part.limit or FIRST_ROWS, FIRST_ROWS), part.subset,
                         part.revision)
        for i in range(len(rows)):
            check.row(rows.others(i, part.column), f"{rows.place(i)} ({field})")
