"""Checks of `rewards` before Ray starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.derived import Derived, judge_rewards, reward_sections
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import LOCAL_MODELS, FunctionReward, ModelReward, RewardConfig
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.answers import TurnEnds
from rlhf_ray.data.load_report import RowErrors
from rlhf_ray.data.row_readers import has_local_rows, section_rows
from rlhf_ray.data.rows import Rows
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import ConfigError, ModelError
from rlhf_ray.models.config_json import pretrained_config
from rlhf_ray.models.loading import load_tokenizer, pads_with_end
from rlhf_ray.models.model_families import is_decoder
from rlhf_ray.stages.preflight import FIRST_ROWS, check_context, check_same_tokens
from rlhf_ray.stages.reward_trial import trials_of
from rlhf_ray.stages.scorers import check_reward, check_scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_rewards(config: PPOConfig, derived: Derived) -> None:
    """Refuse rewards that cannot work, and a critic that cannot be initialised from one.

    Raises:
        ModelError, ConfigError, DataError: naming the component and the fix.
    """
    sections = [config.prompts, derived.evaluation_prompts]
    functions = any(isinstance(reward, FunctionReward) for reward in reward_sections(config).values())
    trials = trials_of(sections, config.model) if functions else []
    lenient = config.reward.on_failure == "quarantine"
    for name, reward in config.rewards.items():
        check_reward(name, reward, config.model, trials, lenient=lenient)
        check_prompt_answers(sections, f"rewards.{name}", name, reward)
    if config.logging.judge is not None:
        check_scorer(config.logging.judge, config.model, "logging.judge", trials, lenient=lenient)
        for name, reward in judge_rewards(config).items():
            check_prompt_answers(sections, f"logging.judge ({name})", name, reward)
    for field, reward in reward_sections(config).items():
        check_reads_longest(reward, config.model, derived.longest_sample, derived.longest_sample_field)
        if config.reward.shards > 1 and isinstance(reward, ModelReward):
            _check_decoder(reward, field, config.reward.shards)
    if derived.starts_critic and config.critic.init == "reward":
        _refuse_labelled_critic(config)
        check_same_tokens(config.model, derived.critic_model,
                          ("model", "rewards, from which critic.init=reward starts"))


def trained_on_other_ends(config: PPOConfig) -> list[str]:
    """A warning about each reward model that reads the policy's tokens and was trained on rows that end otherwise than
    the policy's responses: it would score a token that it was not trained to score at."""
    warnings = []
    policy = load_tokenizer(config.model)
    own = _answer_end(policy, config.model)
    for field, reward in reward_sections(config).items():
        if not isinstance(reward, ModelReward) or not is_decoder(pretrained_config(reward)):
            continue
        tokenizer = load_tokenizer(reward, require_eos=False)
        if tokenizer.eos_token_id is None or tokenizer_digest(tokenizer) != tokenizer_digest(policy):
            continue
        if (theirs := _answer_end(tokenizer, reward)) != own:
            texts = [repr(policy.convert_ids_to_tokens(end)) for end in (theirs, own)]
            warnings.append(f"answers to chat messages end with {texts[0]} where {field}.path={reward.path!r} is "
                            f"trained, and with {texts[1]} where the policy samples them: scores are read at a token "
                            "that the reward model may not know; give both models the same chat template and "
                            "generation_config.json, and train the reward model again")
    return warnings


def _answer_end(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> int:
    """The token that ends an answer to chat messages, or a text if there is no template."""
    ends = TurnEnds.of(tokenizer, model)
    return ends.end if ends.closing[0] is None else ends.closing[0]


def _refuse_labelled_critic(config: PPOConfig) -> None:
    """A critic has one output, and cannot start from a head with several labels."""
    for name, reward in config.rewards.items():
        if isinstance(reward, ModelReward) and (reward.label is not None or reward.value == "probability"):
            field = "label" if reward.label is not None else "value"
            raise ConfigError(f"critic.init=reward starts the critic's value head from rewards.{name}, whose reward is "
                              f"not the head's only output (rewards.{name}.{field}={getattr(reward, field)!r}); set "
                              "critic.init=policy")


def check_reads_longest(reward: RewardConfig, model: ModelConfig, tokens: int, fields: str) -> None:
    """Refuse a local reward model whose context is shorter than the longest sample of `model`. One with another
    tokenizer reads texts, whose length it counts itself.

    Args:
        tokens, fields: as in `check_context`.

    Raises:
        ModelError: naming the fields and the context.
    """
    if isinstance(reward, LOCAL_MODELS) and (
            tokenizer_digest(load_tokenizer(model)) == tokenizer_digest(load_tokenizer(reward, require_eos=False))):
        check_context(reward, tokens, fields)


def _check_decoder(reward: ModelReward, field: str, shards: int) -> None:
    """Refuse to shard an encoder, whose passes the ranks do not make together."""
    if not is_decoder(shape := pretrained_config(reward)):
        raise ModelError(f"{field}.path={reward.path!r} is of the family {shape.model_type!r}, which is no decoder, "
                         f"and reward.shards={shards} divides decoders only: set reward.shards to 1, or use a decoder")


def scored_elsewhere(config: PPOConfig) -> list[str]:
    """A warning about each reward model that transformers scores at another token than this package."""
    return [f"{field}.path={reward.path!r} has its end-of-sequence token as padding token: transformers scores such a "
            "model at the token before the end, and here it is scored at the end. If it was trained with transformers' "
            "own scores, they differ; give it a padding token of its own and train it further"
            for field, reward in reward_sections(config).items()
            if isinstance(reward, ModelReward) and is_decoder(pretrained_config(reward)) and pads_with_end(reward)]


def check_prompt_answers(sections: Iterable[PromptsConfig | None], section: str, name: str,
                         reward: RewardConfig) -> None:
    """Check the first rows of local data sets of prompts for the columns that a reward reads, and for answers that a
    response can be compared with. The other rows are checked when the prompt reader loads them.

    Args:
        section: names the reward in messages.

    Raises:
        DataError: names the rows.
    """
    from rlhf_ray.rewards.answer_check import AnswerCheck

    check = AnswerCheck(section, name, reward)
    for field, part in (named for prompts in sections if prompts for named in prompts.named_parts()):
        if not check.columns or not has_local_rows(part):
            continue
        first = part.model_copy(update={"limit": min(part.limit or FIRST_ROWS, FIRST_ROWS)})

        def read(rows: Rows, i: int, column: str = part.column, field: str = field) -> None:
            check.row(rows.others(i, column), f"{rows.place(i)} ({field})")

        row_errors = RowErrors()
        for rows in section_rows(first, row_errors):
            row_errors.values(rows, read)
        row_errors.check()
