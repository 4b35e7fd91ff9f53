"""Solutions whose steps are labelled, for process reward models, and their split into training and held-out rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.config.data import ProcessRowsConfig
from rlhf_ray.config.steps import StepsConfig
from rlhf_ray.data.encoding import encode_prompts, flat_tokens
from rlhf_ray.data.preferences import held_out_rows
from rlhf_ray.data.report import LoadReport, keep_rows
from rlhf_ray.data.rows import Rows, checked_text, read_rows
from rlhf_ray.data.step_format import StepTokens
from rlhf_ray.errors import DataError
from rlhf_ray.records import Ragged, offsets_of, per_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100
"""Label of steps without one, and of all tokens that are no placeholder (as in `algorithms.losses`)."""


@dataclass(frozen=True)
class StepRows(Ragged):
    """Prompts and solutions in steps, as a process reward model reads them (see `step_format`)."""

    tokens: NDArray[np.int32] = per_token()
    placeholders: NDArray[np.bool_] = per_token()
    """True on the placeholder after each step."""
    labels: NDArray[Any] = per_token()
    """At placeholders int64 ids of the good or the bad token (hard labels), or float32 probabilities that the step is
    right (soft labels); IGNORE elsewhere and where there is no label."""


def load_process_rows(
    config: ProcessRowsConfig, steps: StepsConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[StepRows, StepRows, LoadReport]:
    """(training rows, held-out rows, report of what was left out: long rows, rows without a label, steps that the
    separator would split).

    Labels are soft as soon as one of the data set lies strictly between 0 and 1, else hard.

    Raises:
        DataError: a file or row that cannot be used (named), no row left, or no way to hold rows out.
        ModelError: the placeholder, good or bad text is no single token; chat messages without a template.
    """
    tokens, rows = StepTokens.of(steps, tokenizer), read_rows(config.path, config.split, config.limit)
    texts, prompts = encode_prompts(rows, config.prompt, tokenizer, may_be_empty=True)
    solutions = [_steps(rows, i, config.steps, steps.separator) for i in range(len(rows))]
    labels = [_labels(rows, i, config.labels, steps, len(solutions[i])) for i in range(len(rows))]
    table = _table(*tokens.rows(tokenizer, prompts, solutions), labels, tokens)
    kept, report = keep_rows(
        rows, {"no step has a label": np.array([np.isnan(row).all() for row in labels]),
               f"a step contains the separator {steps.separator!r}": np.array([
                   any(steps.separator in step for step in solution) for solution in solutions]),
               f"longer than max_tokens={config.max_tokens}": table.lengths > config.max_tokens},
        fix="Label the steps, choose another steps.separator, or raise max_tokens")
    held = held_out_rows([texts[i] for i in kept], config.held_out)
    return table.select(kept[~held]), table.select(kept[held]), report


def _table(
    rows: list[list[int]], places: list[list[int]], labels: list[NDArray[np.float64]], tokens: StepTokens
) -> StepRows:
    """All rows, with labels at the placeholders."""
    offsets = offsets_of([len(row) for row in rows])
    at = np.array([start + place for start, row in zip(offsets[:-1], places, strict=True) for place in row], np.int64)
    good = np.concatenate(labels)
    soft = bool(((good > 0) & (good < 1)).any())
    placeholders = np.zeros(offsets[-1], dtype=bool)
    placeholders[at] = True
    column = np.full(offsets[-1], IGNORE, dtype=np.float32 if soft else np.int64)
    given = ~np.isnan(good)
    column[at[given]] = good[given] if soft else np.where(good[given] == 1, tokens.good, tokens.bad)
    return StepRows(offsets=offsets, tokens=flat_tokens(rows), placeholders=placeholders, labels=column)


def _steps(rows: Rows, i: int, column: str, separator: str) -> list[str]:
    """The steps of row i, without a separator at their ends."""
    steps = _list(rows, i, column, "texts")
    if not steps:
        raise DataError(f"{rows.place(i)}: column {column!r} is an empty list; give at least one step")
    texts = [checked_text(step, rows.place(i), f"{column}[{n}]") for n, step in enumerate(steps)]
    return [text.removeprefix(separator).removesuffix(separator) for text in texts]


def _labels(rows: Rows, i: int, column: str, steps: StepsConfig, count: int) -> NDArray[np.float64]:
    """[count] probability that each step of row i is right; NaN without a label."""
    labels = _list(rows, i, column, "labels")
    if len(labels) != count:
        raise DataError(f"{rows.place(i)}: {len(labels)} labels in column {column!r} for {count} steps; give one for "
                        "each, null where there is none")
    words = {steps.good: 1.0, steps.bad: 0.0}
    found = [np.nan if label is None else words.get(label, label) if isinstance(label, str) else label
             for label in labels]
    for n, label in enumerate(found):
        if not isinstance(label, bool | int | float) or label < 0 or label > 1:
            raise DataError(f"{rows.place(i)}: {column}[{n}] is {label!r}; a label is true, false, a number from 0 to "
                            f"1, {steps.good!r}, {steps.bad!r} or null")
    return np.array(found, dtype=np.float64)


def _list(rows: Rows, i: int, column: str, of: str) -> list[Any]:
    value = rows.value(i, column)
    if not isinstance(value, list):
        raise DataError(f"{rows.place(i)}: column {column!r} must be a list of {of}, not {type(value).__name__}; CSV "
                        "files hold no lists, so use JSON lines or parquet")
    return value
