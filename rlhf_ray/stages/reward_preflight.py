"""Checks of `rewards` before Ray starts."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.derived import derive, judge_rewards, reward_sections
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
from rlhf_ray.data.row_readers import read_rows
from rlhf_ray.data.rows import brief
from rlhf_ray.data.stepwise_format import StepTokens, load_steps
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import ConfigError, DataError, ModelError, RewardError
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import check_scalar_head, load_tokenizer
from rlhf_ray.models.model_families import Use, check_family, is_decoder
from rlhf_ray.rewards.http.source import HTTPSource
from rlhf_ray.rewards.rules import GuardedRuleSource, RuleSource
from rlhf_ray.rewards.sources import make_source
from rlhf_ray.stages.preflight import FIRST_ROWS, check_context, check_model, check_same_tokens
from rlhf_ray.stages.scorers import check_scorer


def check_rewards(config: PPOConfig) -> None:
    """Refuse rewards that cannot work, and a critic that cannot be initialised from one.

    Raises:
        ModelError, ConfigError, DataError: naming the component and the fix.
    """
    for name, reward in config.rewards.items():
        _check_source(config, name, reward)
        _check_answers(config, f"rewards.{name}", reward)
    if config.logging.judge is not None:
        check_scorer(config.logging.judge, config.model, "logging.judge")
        for name, reward in judge_rewards(config).items():
            _check_answers(config, f"logging.judge ({name})", reward)
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


def _check_answers(config: PPOConfig, section: str, reward: RewardConfig) -> None:
    """Check the first rows of each local file for the columns that the reward reads, and for answers that a response
    can be compared with."""
    columns = _columns(reward)
    if not columns:
        return
    source = make_source(section, reward, config.model, config.reward.micro_batch_tokens)
    usable = source.usable if isinstance(source, RuleSource | GuardedRuleSource) else lambda _: True
    for field, part in _prompt_files(config):
        rows = read_rows(part.location, part.split, min(part.limit or FIRST_ROWS, FIRST_ROWS), part.subset,
                         part.revision)
        for i in range(len(rows)):
            row = rows.others(i, part.column)
            for key, column in columns:
                where = f"{section}.{key}={column!r}: {rows.place(i)} ({field})"
                if column not in row:
                    raise DataError(f"{where} has no such column; the other columns are {sorted(row)}")
                if not usable(row[column]):
                    raise DataError(f"{where} is {brief(row[column])}, which a reward of type {reward.type} cannot "
                                    "compare with a response; name the column with the answer, or fix the row")


def _columns(reward: RewardConfig) -> list[tuple[str, str]]:
    """Fields of a reward that name columns, with the columns."""
    if isinstance(reward, HTTPReward):
        return [("columns", column) for column in reward.columns]
    column = getattr(reward, "answer", None)
    if column is None or (isinstance(reward, RegexReward) and reward.group is None):
        return []
    return [("answer", column)]


def _prompt_files(config: PPOConfig) -> list[tuple[str, PromptsConfig]]:
    """Sections of prompts that are local files, with the field of each."""
    sections = [config.prompts, derive(config).evaluation_prompts]
    return [(field, part) for section in sections if section for field, part in section.named_parts()
            if Path(part.location).expanduser().is_file()]
