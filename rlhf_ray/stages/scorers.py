"""The scorer named on a command line: a judge, a reward model, a rule, a function, a service, or a file with
several."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import FunctionReward, HTTPReward, ModelReward, ProcessReward, RewardConfig
from rlhf_ray.config.scorer_names import KNOWN, YAML, scorer_rewards
from rlhf_ray.data.chat import PromptFormat
from rlhf_ray.data.stepwise_format import StepTokens, load_steps
from rlhf_ray.data.tokenizer import tokenizer_digest
from rlhf_ray.errors import ConfigError, ModelError, RewardError
from rlhf_ray.internals.asyncio import run_coroutine
from rlhf_ray.models.loading import check_model_directory, check_scalar_head, load_tokenizer
from rlhf_ray.models.model_families import Use, check_family
from rlhf_ray.records import RewardScores
from rlhf_ray.rewards.protocol import RewardAnswer, RewardRequest
from rlhf_ray.roles.prompt_input import PromptInput, formatted_prompt
from rlhf_ray.stages.preflight import check_model
from rlhf_ray.stages.reward_trial import RESPONSES, Trial, requests_of_trial, try_function

SECTIONS = r"rewards\.(vader|exact_match|number|http|function|model)\b"
"""How errors name a scorer that was not read from a file."""


class Scorer(Protocol):
    """Scores answers; see `rewards.protocol.RewardSource`."""

    async def start(self) -> Mapping[str, float] | None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> RewardAnswer | RewardScores: ...

    async def stop(self) -> None: ...


def scorer_of(name: str, model: ModelConfig) -> Scorer:
    """The scorer called `name` (see `KNOWN`) for answers of `model`; it is not started.

    Raises:
        ConfigError, ModelError: no such scorer exists.
    """
    from rlhf_ray.rewards.sources import make_sources

    return make_sources(rewards_of(name), model)


def check_scorer(name: str, model: ModelConfig, option: str, trials: Sequence[Trial] = (), *,
                 lenient: bool = False) -> None:
    """Refuse a scorer that cannot work, before a model is loaded: import its functions, connect to its services, read
    the headers of its models. Everything is stopped again.

    Args:
        option: the option that names the scorer, for messages: "--scorer".
        trials, lenient: calls of functions, see `try_function`.

    Raises:
        ConfigError, ModelError: naming the option.
    """
    with errors_name_option(name, option):
        for component, reward in rewards_of(name, option).items():
            check_reward(component, reward, model, trials, lenient=lenient)


def check_reward(name: str, reward: RewardConfig, model: ModelConfig, trials: Sequence[Trial] = (), *,
                 lenient: bool = False) -> None:
    """Refuse the component `rewards.NAME` if it cannot work for answers of `model`. Everything is stopped again.

    Args:
        trials, lenient: calls of a function, see `try_function`.

    Raises:
        ConfigError, ModelError: naming the component.
    """
    field = f"rewards.{name}"
    match reward:
        case ModelReward():
            check_model(reward, field, require_eos=False)
            check_scalar_head(reward, field, reward.label)
        case ProcessReward():
            check_model(reward, field)
            check_family(reward, field, {Use.LANGUAGE})
            StepTokens.of(load_steps(reward, field), load_tokenizer(reward))
        case _:
            try:
                if isinstance(reward, FunctionReward):
                    run_coroutine(try_function(name, reward, trials, lenient=lenient))
                else:
                    run_coroutine(_try_start(name, reward, model))
            except RewardError as error:  # one that cannot work from the start is an error of the configuration
                raise ConfigError(str(error)) from None


async def _try_start(name: str, reward: RewardConfig, model: ModelConfig) -> None:
    """Start a source here, as the reward scorer will do, or ask a service."""
    from rlhf_ray.rewards.http.source import HTTPSource
    from rlhf_ray.rewards.sources import make_source

    if isinstance(reward, HTTPReward):
        await HTTPSource(name, reward).check(tokenizer_digest(load_tokenizer(model)))
        return
    source = make_source(name, reward, model)
    try:
        await source.start()
    finally:
        await source.stop()


@contextmanager
def errors_name_option(name: str, option: str) -> Iterator[None]:
    """Make errors of a scorer that was named by an option speak of that option instead of a section of `rewards`."""
    try:
        yield
    except (ConfigError, ModelError, RewardError) as error:
        if Path(name).suffix in YAML:
            raise
        text = re.sub(rf" \({SECTIONS}\)", "", str(error))
        text = re.sub(rf"(?<![\w/'\"]){SECTIONS}(\.(urls|function|path))?", option, text)
        text = text.replace(f"{option}.label", "`label` in a .yaml file with a `rewards` section")
        raise type(error)(text if option in text else f"{option} {name}: {text}") from None


def check_answers(name: str, questions: Sequence[PromptInput], model: ModelConfig, option: str) -> None:
    """Refuse prompts without the columns that the scorer reads, or with an answer that no response can be compared
    with.

    Args:
        option: the option that names the scorer, for messages.

    Raises:
        DataError: names the first such prompt.
    """
    from rlhf_ray.rewards.answer_check import AnswerCheck

    for component, reward in rewards_of(name, option).items():
        check = AnswerCheck(f"{option} {name}", component, reward)
        for question in questions:
            check.row(question.metadata, question.location)
        if isinstance(reward, FunctionReward) and questions:
            with errors_name_option(name, option):
                check_reward(component, reward, model, [_trial_of(questions, model)])


def _trial_of(questions: Sequence[PromptInput], model: ModelConfig) -> Trial:
    tokenizer, first = load_tokenizer(model), questions[: len(RESPONSES)]
    prompts = [formatted_prompt(PromptFormat(tokenizer, "prompt"), question, as_chat=False) for question in first]
    requests = requests_of_trial(prompts, [dict(question.metadata) for question in first], tokenizer)
    return Trial("the prompts", requests, frozenset(name for question in questions for name in question.metadata))


def rewards_of(name: str, option: str = "--scorer") -> dict[str, RewardConfig]:
    """The components of a scorer, by name.

    Raises:
        ConfigError, ModelError: it is not one of `KNOWN`.
    """
    rewards = scorer_rewards(name, option)
    if Path(name).suffix not in YAML and isinstance(model := rewards.get("model"), ModelReward):
        try:
            check_model_directory(model, option, argument=True)
        except ModelError as error:
            raise ModelError(f"{error} Name one of: {KNOWN}") from None
    return rewards
