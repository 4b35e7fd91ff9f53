"""Environments are loaded once before anything starts, and begun with a real row: a wrong path, a missing type hint, a
column that is not there and a template that knows no tools are found in a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.derived import derive
from rlhf_ray.config.environments import EnvironmentConfig
from rlhf_ray.config.loopback import is_loopback
from rlhf_ray.config.stages import PPOConfig
from rlhf_ray.data.prompts import prompt_format, prompt_of
from rlhf_ray.data.row_readers import has_local_rows
from rlhf_ray.data.turn_template import TurnTemplate
from rlhf_ray.environments.pool import EnvironmentFacts, EnvironmentPool
from rlhf_ray.errors import ConfigError, DataError, EpisodeFailed, ModelError
from rlhf_ray.internals.asyncio import run_coroutine
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.models.stop_tokens import named_stop_tokens
from rlhf_ray.roles.engines.vllm_tool_calls import tool_call_parser
from rlhf_ray.roles.episode import NOTHING_TO_READ
from rlhf_ray.stages.reward_trial import first_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIAL_S = 10.0
"""Longest time for a reset. An environment that needs longer is not checked further."""
SHAPES = {"tools": "tools", "class": "a class with tools", "environment": "an environment in messages",
          "agent": "an agent"}


def check_environments(config: PPOConfig) -> None:
    """Refuse environments that cannot be used.

    Raises:
        ModelError: the tokenizer's chat template cannot write their episodes.
        EnvironmentFailed: one cannot be loaded.
        ConfigError: one fails with the first row of the data, or no format of tool calls has its name.
        DataError: a row names none of them.
    """
    if not config.environments:
        return
    tokenizer = load_tokenizer(config.model)
    template = TurnTemplate(tokenizer, named_stop_tokens(tokenizer, config.model))
    rows: dict[str, dict[str, Any]] = {}
    for section in filter(None, (config.prompts, derive(config).evaluation_prompts)):
        for name, row in _first_rows(section, config, tokenizer):
            rows.setdefault(name, row)
    agents = []
    for name, environment in config.environments.items():
        facts = run_coroutine(_begun(name, config, rows.get(name)))
        agents += [name] if facts.shape == "agent" else []
        if facts.tools:
            template.require(f"environments.{name}", facts.tools)
        try:
            tool_call_parser(environment.tool_format, tokenizer)
        except ConfigError as error:
            raise ConfigError(f"environments.{name}.{error}") from error
    host = config.episode_runner.gateway_host
    if agents and not is_loopback(host):
        logging.getLogger(__name__).warning(
            f"episode_runner.gateway_host={host!r} lets in whoever reaches that address and has the URL and the key of "
            f"an episode of {', '.join(f'environments.{name}' for name in agents)}, which are sent in the clear: they "
            "may ask the policy. Use a network that only the agents reach")


def in_words(name: str, facts: EnvironmentFacts) -> str:
    """A loaded environment: "environments.tools is a class with tools (lookup, submit): env.py:4: class Shop"."""
    kept = ", with snapshots" if facts.restorable else "" if facts.replayable else ", not replayable"
    place = f": {facts.place}" if facts.place else ""
    tools = ", ".join(str(tool.get("function", tool).get("name")) for tool in facts.tools)
    return f"environments.{name} is {SHAPES[facts.shape]}{f' ({tools})' if tools else ''}{kept}{place}"


async def _begun(name: str, config: PPOConfig, row: Mapping[str, Any] | None) -> EnvironmentFacts:
    """Load an environment, and begin an episode with a row, if there is one. An agent is not run: it would ask a policy
    that is not there."""
    pool = EnvironmentPool(name, config.environments[name])
    try:
        facts = await pool.start()
        if facts.shape == "agent":
            _check_columns(name, config.environments[name], facts, row)
        elif row is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(TRIAL_S):
                    environment = await pool.open(dict(row), config.run.seed)
                    facts = replace(facts, tools=facts.tools or environment.start.tools)
                    await environment.close()
                    if not (row["prompt"] or environment.start.messages or environment.observation):
                        raise EpisodeFailed("error_environment", NOTHING_TO_READ)
        return facts
    except EpisodeFailed as error:
        if error.cause == "error_timeout":
            return facts
        raise ConfigError(f"environments.{name} fails with a row of the data, before anything is trained: {error}"
                          ) from error
    finally:
        await pool.stop()


def _check_columns(name: str, environment: EnvironmentConfig, facts: EnvironmentFacts, row: Mapping[str, Any] | None
                   ) -> None:
    """Refuse a program whose arguments name a column that a row lacks."""
    if row is None or not (missing := [column for column in facts.columns if column not in row]):
        return
    raise ConfigError(f"environments.{name}.{environment.source[0]}: its arguments name the column {missing[0]!r}, "
                      f"which a row of the data lacks; its columns are {', '.join(row)}. Write "
                      f"{{{{{missing[0]}}}}} for {{{missing[0]}}} itself")


def _first_rows(
    section: PromptsConfig, config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, dict[str, Any]]]:
    """The first rows of local data sets, each with the name of its environment. A data set whose rows cannot be read
    has none: other checks report it."""
    found: list[tuple[str, dict[str, Any]]] = []
    column = config.episode_runner.column
    names = list(config.environments)
    for part in section.parts():
        if not has_local_rows(part):
            continue
        with suppress(ModelError, DataError):
            form = prompt_format(part, tokenizer)
            rows = first_rows(part)
            for i in range(len(rows)):
                prompt = form.read(rows, i)
                row = rows.others(i, part.column)
                name = names[0] if len(names) == 1 else row.get(column)
                found.append((str(name), {"prompt": prompt_of(prompt.text, prompt.messages), **row}))
        if unknown := [name for name, _ in found if name not in names]:
            raise DataError(f"{part.location}: column {column!r} (episode_runner.column) is {unknown[0]!r} in one of "
                            f"the first rows, and names one of the environments {', '.join(names)}; correct the rows")
    return found
