"""Calls reward functions once before anything starts, with real prompts and invented responses: a wrong signature, a
list of the wrong length, NaN and exceptions are found in a second instead of after the first rollout."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_ray.config.data import PromptsConfig
from rlhf_ray.config.model import ModelConfig
from rlhf_ray.config.rewards import FunctionReward
from rlhf_ray.data.answers import Prefills
from rlhf_ray.data.chat import PromptText
from rlhf_ray.data.encoding import encode_prompts
from rlhf_ray.data.load_report import RowErrors
from rlhf_ray.data.prompts import prompt_format
from rlhf_ray.data.row_readers import has_local_rows, section_rows
from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import ConfigError, DataError, ModelError, RewardError, SampleError
from rlhf_ray.models.loading import load_tokenizer
from rlhf_ray.records import SampleKey
from rlhf_ray.rewards.function_source import ARGUMENTS, FunctionSource
from rlhf_ray.rewards.function_subprocess import COMPLETIONS
from rlhf_ray.rewards.protocol import RewardRequest
from rlhf_ray.stages.preflight import FIRST_ROWS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSES = (("This response is invented: 42.", "stop"), ("So is this one", "length"))
"""The responses, and how each ended."""
TRIAL_S = 10.0
"""Longest time for the call. A function that needs longer is not checked further."""
NEEDS_GPU = re.compile(r"\b(cuda|nvidia|rocm|hip|gpus?)\b", re.IGNORECASE)
"""In the error of a function that does not find its GPU: the reward scorers may run where there is one."""


@dataclass(frozen=True)
class Trial:
    """One call."""

    field: str
    """Names the data set in messages: "prompts.path"."""
    requests: list[RewardRequest]
    columns: frozenset[str]
    """Columns of the section's rows."""


def trials_of(sections: Iterable[PromptsConfig | None], model: ModelConfig) -> list[Trial]:
    """A trial for each local data set of prompts, with its first rows. A data set whose rows cannot be read has none:
    other checks report it."""
    trials: list[Trial] = []
    tokenizer = load_tokenizer(model)
    for section in filter(None, sections):
        found: list[tuple[str, list[RewardRequest]]] = []
        columns: set[str] = set()
        for field, part in section.named_parts():
            with suppress(DataError, ModelError):
                if has_local_rows(part):
                    rows = first_rows(part)
                    columns.update(*(rows.others(i, part.column) for i in range(len(rows))))
                    form, two = prompt_format(part, tokenizer), range(min(len(rows), len(RESPONSES)))
                    prompts = [form.read(rows, i) for i in two]
                    found.append((field, requests_of_trial(prompts, [rows.others(i, part.column) for i in two],
                                                           tokenizer)))
        trials += [Trial(field, requests, frozenset(columns)) for field, requests in found if requests]
    return trials


def first_rows(part: PromptsConfig) -> Rows:
    """The first rows of a data set, at most `FIRST_ROWS`."""
    first = part.model_copy(update={"limit": min(part.limit or FIRST_ROWS, FIRST_ROWS)})
    return next(section_rows(first, RowErrors()))


def requests_of_trial(prompts: Sequence[PromptText], rows: Sequence[dict[str, Any]],
                      tokenizer: PreTrainedTokenizerBase) -> list[RewardRequest]:
    """An invented response to each prompt, of which there are at most as many as `RESPONSES`."""
    prefills, tokens = Prefills(tokenizer), encode_prompts(tokenizer, list(prompts))
    return list(_invented(prompts, rows, tokens, prefills, tokenizer))


def _invented(prompts: Sequence[PromptText], rows: Sequence[dict[str, Any]], tokens: Sequence[Sequence[int]],
              prefills: Prefills, tokenizer: PreTrainedTokenizerBase) -> Iterator[RewardRequest]:
    for number, (prompt, row, before) in enumerate(zip(prompts, rows, tokens, strict=True)):
        text, reason = RESPONSES[number]
        response = tokenizer.encode(text, add_special_tokens=False)
        if reason == "stop" and tokenizer.eos_token_id is not None:
            response = [*response, tokenizer.eos_token_id]
        yield RewardRequest(
            key=SampleKey(0, number, 0), prompt=prompt.text, response=text,
            tokens=np.array([*before, *response], dtype=np.int32),
            response_mask=np.arange(len(before) + len(response)) >= len(before), finish_reason=reason,
            metadata=dict(row), messages=prompt.messages, prefill=prefills.of(prompt))


async def try_function(name: str, reward: FunctionReward, trials: Sequence[Trial], *, lenient: bool = False) -> None:
    """Import a function, and call it for each trial. It is stopped again.

    Args:
        lenient: a sample may remain without a score; a failed call is a warning then.

    Raises:
        RewardError: it cannot be imported, or its signature does not fit.
        ConfigError: a call failed, or no row has a column that it requires.
    """
    source, field = FunctionSource(name, reward), f"rewards.{name}"
    warn = logging.getLogger(__name__).warning
    try:
        await source.start()
        for trial in trials:
            if missing := [column for column in source.columns if column not in trial.columns]:
                raise ConfigError(
                    f"the reward function {reward.function!r} ({field}) cannot be used: it requires "
                    f"{', '.join(missing)}, which is no column of the rows of {trial.field} (their other columns: "
                    f"{', '.join(sorted(trial.columns)) or 'none'}), and none of the other arguments: "
                    f"{', '.join(ARGUMENTS)}; for functions that take columns: {', '.join(COMPLETIONS)}. Rename the "
                    "argument, give it a default, or add the column")
            async with asyncio.timeout(TRIAL_S):
                await source.score(trial.requests)
    except TimeoutError:
        warn(f"{field}: the function {reward.function!r} gave no score for {len(trial.requests)} responses within "
             f"{TRIAL_S:g} s, so it was not checked before the start; each call may take "
             f"rewards.{name}.timeout_s={reward.timeout_s:g}")
    except RewardError as error:
        if NEEDS_GPU.search(str(error)):
            warn(f"{error}\n(Not checked further: the reward scorers may have the GPU that it speaks of)")
        elif not isinstance(error, SampleError):
            raise
        else:
            text = f"{error}\n(A call before the start, with the first rows of {trial.field} and invented responses)"
            if not lenient:
                raise ConfigError(text) from None
            warn(text)
    finally:
        await source.stop()
