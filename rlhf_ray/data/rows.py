"""Reading rows of text from a local file or a Hub data set, so that whatever is wrong is named by file and line.

Local JSON lines and CSV files are parsed here, line by line, because an error must name its line; parquet files are
read by pyarrow, Hub names by `datasets`. What the columns mean is left to the callers.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_ray.errors import DataError

Numbered = Iterator[tuple[int, dict[str, Any]]]
"""(line number from 1, row)."""
BLOCK = 1000
"""Rows that are read, tokenised and written together."""


@dataclass(frozen=True)
class Rows:
    """Rows as they stood in their source, with the place of each for messages."""

    source: str
    """File path or Hub name."""
    records: list[dict[str, Any]]
    """[N] column name to value."""
    lines: list[int]
    """[N] line in the file (JSON lines, CSV) or row number (parquet, Hub), from 1."""

    def __len__(self) -> int:
        return len(self.records)

    def place(self, i: int) -> str:
        """Where row i stands, for a message."""
        return f"{self.source}, line {self.lines[i]}"

    def value(self, i: int, column: str) -> Any:
        """The value of a column in row i.

        Raises:
            DataError: the row has no such column; names those it has.
        """
        record = self.records[i]
        if column not in record:
            raise DataError(f"{self.place(i)}: no column {column!r}; the row has {sorted(record)}. "
                            "Name the right column in the configuration, or add it")
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
            raise DataError(f"{self.place(i)}: column {column!r} must be a finite number, not {_brief(value)}")
        return number

    def others(self, i: int, column: str) -> dict[str, Any]:
        """The columns of row i but for one."""
        return {name: value for name, value in self.records[i].items() if name != column}


def checked_text(value: Any, place: str, column: str, *, may_be_empty: bool = False) -> str:
    """`value`, if it is a text that can be used.

    Raises:
        DataError: it is not; names the place, the column and what is wrong.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: column {column!r} must be a text, not {type(value).__name__} ({_brief(value)})")
    if not may_be_empty and not value.strip():
        raise DataError(f"{place}: column {column!r} is empty; give it a text or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: column {column!r} is not Unicode text: half a surrogate pair at character "
                        f"{error.start + 1}; repair it") from None
    return value


def read_rows(path: str, split: str = "train", limit: int | None = None) -> Rows:
    """All rows, or the first `limit`, at once; otherwise as `stream_rows`."""
    blocks = list(stream_rows(path, split, limit))
    return Rows(path, [r for block in blocks for r in block.records], [n for block in blocks for n in block.lines])


def stream_rows(path: str, split: str = "train", limit: int | None = None) -> Iterator[Rows]:
    """Blocks of rows, all or the first `limit`, of a local .jsonl/.json (JSON lines), .csv or .parquet file or a Hub
    data set. No more than a block is in memory at a time.

    Raises:
        DataError: nothing there, not readable, a malformed row (named by line), or no rows at all.
    """
    numbered, found = islice(_open(path, split), limit), False
    while block := list(islice(numbered, BLOCK)):
        found = True
        yield Rows(path, [record for _, record in block], [line for line, _ in block])
    if not found:
        raise DataError(f"{path}: no rows; give a file with at least one")


def _open(path: str, split: str) -> Numbered:
    readers = {".jsonl": _read_json_lines, ".json": _read_json_lines, ".csv": _read_csv, ".parquet": _read_parquet}
    file = Path(path).expanduser()
    if file.is_file():
        if file.suffix.lower() not in readers:
            raise DataError(f"{path}: unknown format {file.suffix!r}; name the file .jsonl, .csv or .parquet")
        return readers[file.suffix.lower()](file)
    if file.is_dir():
        raise DataError(f"{path} is a directory; name one .jsonl, .csv or .parquet file")
    if file.suffix.lower() in readers or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise DataError(f"no such file: {path} (looked from {Path.cwd()}); write it first (`rlhf-ray quickstart` makes "
                        "a set of its own) or correct the path in the configuration")
    return _read_hub(path, split)


def _read_json_lines(file: Path) -> Numbered:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark, as some editors write it
            if line.strip():
                yield number, _parse_json_row(line, f"{file}, line {number}")


def _parse_json_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text (byte {error.start + 1}: {error.reason}); save it as UTF-8") from None
    except json.JSONDecodeError as error:
        wrong = error.msg.removesuffix(" at")
        raise DataError(f"{place}: not valid JSON: {wrong} at column {error.colno}; write one object a line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested a thousand deep
        raise DataError(f"{place}: JSON that cannot be read: {error}; write one flat object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be an object {{...}}, not {type(row).__name__} ({_brief(row)})")
    return row


def _read_csv(file: Path) -> Numbered:
    """Rows of a CSV file with a header; every value is a text."""
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(f"{file}, line {reader.line_num}: not as many fields as the header has "
                                    f"({reader.fieldnames}); quote fields that hold commas")
                yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{file}, line {reader.line_num}: not valid CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{file}, after line {reader.line_num}: not UTF-8 text ({error.reason}); save it as "
                            "UTF-8") from None


def _read_parquet(file: Path) -> Numbered:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
        rows = (row for batch in parquet.iter_batches() for row in batch.to_pylist())
        yield from enumerate(rows, start=1)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable parquet file: {error}") from error


def _read_hub(name: str, split: str) -> Numbered:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split)
    except Exception as error:  # datasets raises a dozen kinds: offline, unknown name, unknown split, gated
        raise DataError(f"{name} is neither a local file nor a Hub data set that could be read (split {split!r}): "
                        f"{type(error).__name__}: {error}. Correct the path, or go online for the Hub") from error
    yield from enumerate(rows, start=1)


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
