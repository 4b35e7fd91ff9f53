"""Finds the columns of demonstrations that nobody names, by the names that data sets usually have.

The first well-formed row of each data set decides. A run saves what was found, see `stages.sft`.
"""

from collections.abc import Collection, Mapping
from typing import TypeVar

from rlhf_ray.config.data import DemonstrationsConfig
from rlhf_ray.data.load_report import RowErrors
from rlhf_ray.data.row_readers import section_rows
from rlhf_ray.errors import DataError

D = TypeVar("D", bound=DemonstrationsConfig)

FORMATS: tuple[dict[str, str], ...] = (
    {"prompt": "prompt", "response": "completion"},
    {"prompt": "prompt", "response": "response"},
    {"messages": "messages"},
    {"messages": "conversations"},
    {"text": "text"},
)
"""Fields of `data`, each with the column that it names, in the order in which they are looked for: a prompt with its
completion before messages, and these before text, as in TRL's `SFTTrainer`."""
USUAL = {column for columns in FORMATS for column in columns.values()}


def columns_found(there: Collection[str], named: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The columns of the first format that has all of its columns among `there`, by field; None without one.

    Args:
        named: the columns that somebody names, by field.
    """
    named = named or {}
    for usual in FORMATS:
        columns = {**usual, **named}
        if named.keys() <= usual.keys() and set(columns.values()) <= set(there):
            return columns
    return None


def with_found_columns(config: D) -> D:
    """The section with the columns that are found in place of those that nobody names, of each data set of a mix.

    Raises:
        DataError: a data set cannot be read, or no format is found in its first row.
    """
    if not config.mix:
        return config if config.names_all_columns else config.model_copy(update=_found_in(config))
    found = [{} if part.names_all_columns else _found_in(part) for part in config.parts()]
    mix = [source.model_copy(update=columns) for source, columns in zip(config.mix, found, strict=True)]
    return config.model_copy(update={"mix": mix})


def _found_in(config: DemonstrationsConfig) -> dict[str, str]:
    """The columns found in the first well-formed row; {} without any, since reading reports that."""
    first = next((rows for rows in section_rows(config, RowErrors(lenient=True)) if len(rows)), None)
    if first is None:
        return {}
    there = first.records[0].keys()
    found = columns_found(there, config.named_columns)
    if found is None and config.prompt is not None:  # that no column has the usual name of a response is said by line
        return {"response": "response"}
    if found is None:
        raise DataError(
            f"{first.place(0)}: no columns of demonstrations are found; the row has {sorted(there)}. Set data.messages "
            "(conversations), data.prompt and data.response, or data.text to the columns; if none is set, those named "
            "prompt and completion (or response), messages (or conversations), or text are read, in this order")
    return found


def in_words(columns: Mapping[str, str]) -> str:
    """A format and its columns: "conversations (column messages)"."""
    if "messages" in columns:
        return f"conversations (column {columns['messages']})"
    if "prompt" in columns:
        return f"prompts with responses (columns {columns['prompt']} and {columns.get('response', 'response')})"
    return f"whole texts (column {columns['text']})"
