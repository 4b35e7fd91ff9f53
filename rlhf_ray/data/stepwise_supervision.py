"""Solutions whose steps are labelled, for process reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.data import ProcessRowsConfig, StepsConfig
from rlhf_ray.data.chat import PromptFormat, PromptText, identity
from rlhf_ray.data.encoding import encode_prompts, flat_tokens
from rlhf_ray.data.held_out import group_digest
from rlhf_ray.data.load_report import LoadReport, RowErrors
from rlhf_ray.data.row_readers import usable_blocks
from rlhf_ray.data.rows import Rows, checked_text
from rlhf_ray.data.stepwise_format import StepTokens
from rlhf_ray.errors import DataError
from rlhf_ray.records import Ragged, offsets_of, per_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100
"""Label of steps without one, and of all tokens that are not placeholders (as in `algorithms.losses`)."""


@dataclass(frozen=True)
class StepRows(Ragged):
    """Prompts and solutions in steps, as a process reward model reads them (see `step_format`)."""

    tokens: NDArray[np.int32] = per_token()
    placeholders: NDArray[np.bool_] = per_token()
    """True on the placeholder after each step."""
    labels: NDArray[Any] = per_token()
    """At placeholders int64 ids of label tokens (hard labels), or float32 probabilities that the step is
    right (soft labels); IGNORE elsewhere and where there is no label."""


@dataclass(frozen=True)
class StepText:
    """One row: a problem and its solution in judged steps."""

    prompt: PromptText
    solution: list[str]
    labels: NDArray[np.float64]
    """[steps] probability that each is right, or 2 and more for the others among the label tokens, in their order; NaN
    without a label."""


def load_process_rows(
    config: ProcessRowsConfig, steps: StepsConfig, tokenizer: PreTrainedTokenizerBase,
    row_errors: RowErrors | None = None,
) -> tuple[StepRows, NDArray[np.uint64], LoadReport]:
    """(rows, [N] `group_digest` of each row's prompt, report of what was left out: long rows, rows without a label,
    steps that the separator would split) of one data set.

    Labels are soft as soon as one of the data set lies strictly between 0 and 1, else hard.

    Args:
        config: a section that is not a mix.
        row_errors: collects malformed rows; None raises an error instead.

    Raises:
        DataError: a file or rows that cannot be used (named), or no row left.
        ModelError: the placeholder, good or bad text is not a single token; chat messages without a template.
    """
    tokens, row_errors = StepTokens.of(steps, tokenizer), row_errors or RowErrors()
    report, blocks = LoadReport(config.location), [_table([], [], [], tokens)]
    digests: list[int] = []
    for rows, values in usable_blocks(config, row_errors, StepFormat(config, steps, tokenizer).read):
        prompts = encode_prompts(tokenizer, [value.prompt for value in values])
        tokenised, places = tokens.rows(tokenizer, prompts, [value.solution for value in values])
        table = _table(tokenised, places, [value.labels for value in values], tokens)
        kept = report.keep(rows, {
            "no step has a label": np.array([np.isnan(value.labels).all() for value in values]),
            f"a step contains the separator {steps.separator!r}": np.array([
                any(steps.separator in step for step in value.solution) for value in values]),
            f"longer than max_tokens={config.max_tokens}": table.lengths > config.max_tokens})
        blocks.append(table.select(kept))
        digests += [group_digest(identity(values[i].prompt.text, values[i].prompt.messages, config.system))
                    for i in kept]
    row_errors.finish(report, "Label the steps, choose another steps.separator, or raise max_tokens")
    return join_step_rows(blocks, tokens.good), np.array(digests, dtype=np.uint64), report


class StepFormat:
    """How the columns of one data set are read."""

    def __init__(self, config: ProcessRowsConfig, steps: StepsConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._steps = config, steps
        self._prompts = PromptFormat(
            tokenizer, config.prompt, system=config.system, as_chat=config.as_chat, may_be_empty=True)

    def read(self, rows: Rows, i: int) -> StepText:
        """Row i.

        Raises:
            DataError, ModelError: the row cannot be used.
        """
        solution = _steps(rows, i, self._config.steps, self._steps.separator)
        labels = _labels(rows, i, self._config.labels, self._steps, len(solution))
        return StepText(self._prompts.read(rows, i), solution, labels)


def join_step_rows(parts: Sequence[StepRows], good: int) -> StepRows:
    """The rows of several data sets; hard labels among soft ones become 1 (the token `good`) and 0."""
    if len({part.labels.dtype for part in parts}) > 1:
        parts = [part if part.labels.dtype == np.float32 else _softened(part, good) for part in parts]
    return StepRows.concat(parts)


def _softened(part: StepRows, good: int) -> StepRows:
    labels = np.where(part.labels == IGNORE, IGNORE, part.labels == good).astype(np.float32)
    return replace(part, labels=labels)


def _table(
    rows: list[list[int]], places: list[list[int]], labels: list[NDArray[np.float64]], tokens: StepTokens
) -> StepRows:
    """All rows, with labels at the placeholders."""
    offsets = offsets_of([len(row) for row in rows])
    at = np.array([start + place for start, row in zip(offsets[:-1], places, strict=True) for place in row], np.int64)
    good = np.concatenate([np.empty(0), *labels])
    soft = bool(((good > 0) & (good < 1)).any())
    placeholders = np.zeros(offsets[-1], dtype=bool)
    placeholders[at] = True
    column = np.full(offsets[-1], IGNORE, dtype=np.float32 if soft else np.int64)
    given = ~np.isnan(good)
    by_number = np.array([tokens.bad, tokens.good, *tokens.others])
    column[at[given]] = good[given] if soft else by_number[good[given].astype(np.int64)]
    return StepRows(offsets=offsets, tokens=flat_tokens(rows), placeholders=placeholders, labels=column)


def _steps(rows: Rows, i: int, column: str, separator: str) -> list[str]:
    """The steps of row i, without a separator at their ends."""
    steps = _list(rows, i, column, "texts")
    if not steps:
        raise DataError(f"{rows.place(i)}: column {column!r} is an empty list; give at least one step")
    texts = [checked_text(step, rows.place(i), f"{column}[{n}]") for n, step in enumerate(steps)]
    return [text.removeprefix(separator).removesuffix(separator) for text in texts]


def _labels(rows: Rows, i: int, column: str, steps: StepsConfig, count: int) -> NDArray[np.float64]:
    """[count] labels of the steps of row i, as in `StepText`."""
    labels = _list(rows, i, column, "labels")
    if len(labels) != count:
        raise DataError(f"{rows.place(i)}: {len(labels)} labels in column {column!r} for {count} steps; give one for "
                        "each, null where there is none")
    words = {steps.good: 1.0, steps.bad: 0.0, **{text: 2.0 + n for n, text in enumerate(steps.others)}}
    values = []
    for n, label in enumerate(labels):
        if isinstance(label, str) and label in words:
            values.append(words[label])
        elif label is None:
            values.append(np.nan)
        elif not isinstance(label, bool | int | float) or label < 0 or label > 1:
            raise DataError(f"{rows.place(i)}: {column}[{n}] is {label!r}; a label is true, false, a number from 0 to "
                            f"1, {', '.join(map(repr, words))} or null")
        elif steps.others and 0 < label < 1:
            raise DataError(f"{rows.place(i)}: {column}[{n}] is {label!r}, a probability of a good step over a bad "
                            "one, but there are steps.others; leave them empty, or label each step by a token")
        else:
            values.append(float(label))
    return np.array(values, dtype=np.float64)


def _list(rows: Rows, i: int, column: str, of: str) -> list[Any]:
    value = rows.value(i, column)
    if not isinstance(value, list):
        raise DataError(f"{rows.place(i)}: column {column!r} must be a list of {of}, not {type(value).__name__}; CSV "
                        "files hold no lists, so use JSON lines or parquet")
    return value
