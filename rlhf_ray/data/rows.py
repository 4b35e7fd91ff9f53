"""Rows of a data set with their file and line numbers, and checked access to their columns.

`row_readers` reads them; the callers know what the columns mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_ray.errors import DataError


@dataclass(frozen=True)
class Rows:
    """Rows of one source, with the place of each for messages."""

    source: str
    """File path or Hub name."""
    records: list[dict[str, Any]]
    """[N] column name to value."""
    lines: list[int]
    """[N] line in the file (JSON lines, CSV) or row number (parquet, Hub), from 1."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Column -> the configuration field that names it, for messages: "prompts.column"."""

    def __len__(self) -> int:
        return len(self.records)

    def select(self, numbers: Sequence[int]) -> Rows:
        """The rows of these numbers."""
        return Rows(self.source, [self.records[i] for i in numbers], [self.lines[i] for i in numbers], self.fields)

    def place(self, i: int) -> str:
        """Source and line of row i, for a message."""
        return f"{self.source}, line {self.lines[i]}"

    def value(self, i: int, column: str) -> Any:
        """The value of a column in row i.

        Raises:
            DataError: the row has no such column; names those it has.
        """
        record = self.records[i]
        if column not in record:
            fix = f"Set {self.fields[column]}" if column in self.fields else "Name the right one"
            raise DataError(f"{self.place(i)}: no column {column!r}; the row has {sorted(record)}. {fix}, or add it")
        return record[column]

    def text(self, i: int, column: str, *, may_be_empty: bool = False) -> str:
        """The text in a column of row i.

        Raises:
            DataError: no such column, not a text, a text that is not Unicode, or (unless allowed) an empty one.
        """
        return checked_text(self.value(i, column), self.place(i), column, may_be_empty=may_be_empty)

    def flag(self, i: int, column: str, *, default: bool) -> bool:
        """The truth value in an optional column of row i; CSV files spell it true or false.

        Raises:
            DataError: the value is neither.
        """
        value = self.records[i].get(column)
        value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
        if value is None:
            return default
        if not isinstance(value, bool):
            raise DataError(f"{self.place(i)}: column {column!r} must be true or false, not {value!r}")
        return value

    def number(self, i: int, column: str) -> float:
        """The finite number in a column of row i; CSV files spell it.

        Raises:
            DataError: no such column, or something else in it.
        """
        value = self.value(i, column)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{self.place(i)}: column {column!r} must be a finite number, not {brief(value)}")
        return number

    def others(self, i: int, column: str) -> dict[str, Any]:
        """The columns of row i except one."""
        return {name: value for name, value in self.records[i].items() if name != column}


def checked_text(value: Any, place: str, column: str, *, may_be_empty: bool = False) -> str:
    """`value`, if it is a usable text.

    Raises:
        DataError: it is not; names the place, the column and what is wrong.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: column {column!r} must be a text, not {type(value).__name__} ({brief(value)})")
    if not may_be_empty and not value.strip():
        raise DataError(f"{place}: column {column!r} is empty; give it a text or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: column {column!r} is not Unicode text: half a surrogate pair at character "
                        f"{error.start + 1}; repair it") from None
    return value


def brief(value: Any) -> str:
    """A value for a message, cut to forty characters."""
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
