"""Readers of rows: JSON lines, CSV, parquet and Hugging Face data sets, block by block, with file and line of errors.

JSON lines and CSV are parsed here, because an error must name its line, which `datasets` (through pyarrow's readers)
does not report, and because it would give all rows one type per column. Parquet has types and no lines, and pyarrow
streams it. `datasets` reads names on the Hub and directories written by `save_to_disk`: it downloads, checks, caches
and maps them into memory.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from glob import escape, glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rlhf_ray.config.data import DataSection, NumberedRows
from rlhf_ray.data.load_report import RowErrors
from rlhf_ray.data.rows import Rows, brief
from rlhf_ray.errors import DataError, first_line
from rlhf_ray.models.hub import HUB_TIMEOUT_S, why_unreachable

T = TypeVar("T")
Numbered = Iterator[tuple[int, dict[str, Any] | DataError]]
"""(line number from 1, row or the error in it)."""
BLOCK = 1000
"""Rows that are read, tokenised and written together."""


@dataclass(frozen=True)
class Split:
    """Which split is read, where a data set has several."""

    name: str | None = None
    """As somebody set it."""
    default: str = DataSection.SPLIT
    """If nobody did."""
    field: str = "split"
    """The field that sets it, for messages."""

    def __str__(self) -> str:
        return self.name or self.default

    def missing(self, source: str, there: Iterable[str]) -> DataError:
        """The error that a data set has only other splits."""
        by_default = "" if self.name else " (the default)"
        return DataError(f"{source} has no split {str(self)!r}{by_default}; it has {sorted(there)}. Set {self.field} "
                         "to one of them")


def read_rows(path: str, split: str | None = None, limit: int | None = None, subset: str | None = None,
              revision: str | None = None) -> Rows:
    """All rows, or the first `limit`, at once; see `stream_rows`."""
    row_errors = RowErrors()
    blocks = list(stream_rows(path, row_errors, Split(split), limit, subset, revision))
    row_errors.check()
    return Rows(path, [r for block in blocks for r in block.records], [n for block in blocks for n in block.lines])


def section_rows(config: DataSection, row_errors: RowErrors) -> Iterator[Rows]:
    """The rows of a section that is not a mix; see `stream_rows`."""
    if config.numbers is not None:
        yield from _numbered_rows(config.location, config.numbers, config.limit)
        return
    split = split_of(config)
    for rows in stream_rows(config.location, row_errors, split, config.limit, config.subset, config.revision):
        yield replace(rows, fields=config.column_fields)


def split_of(config: DataSection) -> Split:
    """The split that a section reads."""
    return Split(config.split, config.SPLIT, f"{config.SECTION}.split")


def _numbered_rows(source: str, numbers: NumberedRows, limit: int | None) -> Iterator[Rows]:
    indices = numbers.indices[:limit]
    for start in range(0, len(indices), BLOCK):
        block = indices[start : start + BLOCK]
        yield Rows(source, [{"prompt": "", "index": index, **numbers.columns} for index in block],
                   list(range(start + 1, start + 1 + len(block))))


def usable_blocks(
    config: DataSection, row_errors: RowErrors, read: Callable[[Rows, int], T]
) -> Iterator[tuple[Rows, list[T]]]:
    """The well-formed rows of each block, and the value that `read` returns for each; none after a malformed row that
    training refuses: what follows is only read for further ones."""
    for block in section_rows(config, row_errors):
        rows, values = row_errors.values(block, read)
        if values and not row_errors.fatal:
            yield rows, values


WHOLE = Split()
"""Of a data set that has no splits, or `train`."""


def stream_rows(path: str, row_errors: RowErrors, split: Split = WHOLE, limit: int | None = None,
                subset: str | None = None, revision: str | None = None) -> Iterator[Rows]:
    """Blocks of rows, all or the first `limit`. No more than a block is in memory at a time.

    Args:
        path: a .jsonl/.json (JSON lines), .csv or .parquet file, a pattern of such files (in the order of their names),
            a directory of `datasets.save_to_disk`, or the name of a Hub data set.
        row_errors: collects malformed rows.

    Raises:
        DataError: the file is missing or unreadable, or has no rows.
    """
    left, count = limit, 0
    for source, rows in _open(path, split, subset, revision):
        rows = islice(rows, left)
        while block := list(islice(rows, BLOCK)):
            count += len(block)
            left = None if limit is None else limit - count
            for line, row in block:
                if isinstance(row, DataError):
                    row_errors.add(row, source, line)
            good = [(line, row) for line, row in block if isinstance(row, dict)]
            yield Rows(source, [row for _, row in good], [line for line, _ in good])
    if not count:
        raise DataError(f"{path}: no rows; give a file with at least one")


def local_files(path: str) -> list[Path] | None:
    """The files that a path or pattern names, in the order of their names; None for a directory, and for what may be
    the name of a Hub data set.

    Raises:
        DataError: there is none, or one of an unknown format.
    """
    file = Path(path)
    if file.is_dir():
        return None
    files = [file] if file.is_file() else []
    if not files and has_magic(path):
        files = sorted(Path(name) for name in glob(_pattern(file), recursive=True) if Path(name).is_file())
    for other in files:
        if other.suffix.lower() not in READERS:
            raise DataError(f"{other}: unknown format {other.suffix!r}; name the file .jsonl, .csv or .parquet")
    if not files and not _may_be_on_hub(path):
        raise DataError(f"{path}: no such file (relative paths start at {Path.cwd()}); create it (`rlhf-ray "
                        "quickstart` makes a data set of its own), or correct the path")
    return files or None


def _pattern(path: Path) -> str:
    """A pattern for `glob`, in which directories that exist under their literal names are not patterns."""
    literal = Path()
    for part in path.parts[:-1]:
        if not (literal / part).is_dir():
            break
        literal /= part
    return os.path.join(escape(str(literal)), path.relative_to(literal))


def is_local(path: str) -> bool:
    """Whether a path names files or a directory of this machine, not a Hub data set."""
    return Path(path).is_dir() or local_files(path) is not None


def has_local_rows(config: DataSection) -> bool:
    """Whether the rows of a section that is not a mix are on this machine, or numbered."""
    return config.numbers is not None or is_local(config.location)


def _may_be_on_hub(path: str) -> bool:
    named = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None
    return named and Path(path).suffix.lower() not in READERS


def check_data_set_on_hub(name: str, revision: str | None, subset: str | None = None, split: Split = WHOLE) -> None:
    """Refuse a data set that is neither on the Hub nor in the local cache, whose reading would try for half a minute,
    and a split that it does not declare.

    Raises:
        DataError: with the Hub's answer.
    """
    from datasets import config
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import HfApi

    *owner, last = name.split("/")
    if (Path(config.HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(last)])).is_dir():
        return
    if (reason := why_unreachable()) is not None:
        raise DataError(f"{name} is neither a local file nor a data set in the local cache, and {reason}")
    try:
        found = HfApi().dataset_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # unknown, gated, offline, ...: the library raises its own kinds and its client's
        at = f" at revision {revision!r}" if revision else ""
        raise DataError(f"{name} is neither a local file nor a data set in the local cache, and could not be found on "
                        f"the Hub{at}: {type(error).__name__}: {first_line(error)}. Correct the path, or go online "
                        "(and `hf auth login` for a private one)") from error
    declared = declared_splits(found.card_data.to_dict() if found.card_data else {}, subset)
    if declared and re.split(r"[\[+]", str(split))[0] not in declared:
        raise split.missing(name, declared)


def declared_splits(card: Mapping[str, Any], subset: str | None) -> set[str]:
    """The splits that the card of a data set declares for a subset (None: its default); empty if it declares none, and
    for a card of another form.

    Args:
        card: the metadata of README.md, with `configs` and `dataset_info` as on
            https://huggingface.co/docs/hub/datasets-manual-configuration.
    """
    parts = [part for key in ("dataset_info", "configs") for part in _as_list(card.get(key)) if isinstance(part, dict)]
    subsets = {part.get("config_name", "default") for part in parts}
    chosen = subset or (subsets.pop() if len(subsets) == 1 else "default")
    splits = [split for part in parts if part.get("config_name", "default") == chosen
              for split in _as_list(part.get("splits")) + _as_list(part.get("data_files"))]
    names = [split.get("name", split.get("split")) for split in splits if isinstance(split, dict)]
    return {name for name in names if isinstance(name, str)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _open(path: str, split: Split, subset: str | None, revision: str | None) -> Iterator[tuple[str, Numbered]]:
    """Each file of `path` with its rows."""
    if (files := local_files(path)) is not None:
        yield from ((str(file) if has_magic(path) else path, _open_file(file)) for file in files)
    elif (directory := Path(path)).is_dir():
        yield path, _read_saved(directory, split)
    else:
        yield path, _read_hub(path, split, subset, revision)


def _open_file(file: Path) -> Numbered:
    try:
        yield from READERS[file.suffix.lower()](file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}; check the file") from error


def _read_json_lines(file: Path) -> Numbered:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark, as some editors write it
            if line.strip():
                yield number, _parse_json_row(line, f"{file}, line {number}")


def _parse_json_row(line: bytes, place: str) -> dict[str, Any] | DataError:
    try:
        row = json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        return DataError(f"{place}: not UTF-8 text (byte {error.start + 1}: {error.reason}); save it as UTF-8")
    except json.JSONDecodeError as error:
        wrong = error.msg.removesuffix(" at")
        return DataError(f"{place}: not valid JSON: {wrong} at column {error.colno}; write one object a line")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested a thousand deep
        return DataError(f"{place}: JSON that cannot be read: {error}; write one flat object per line")
    if not isinstance(row, dict):
        return DataError(f"{place}: a row must be an object {{...}}, not {type(row).__name__} ({brief(row)})")
    return row


def _read_csv(file: Path) -> Numbered:
    """Rows of a CSV file with a header; every value is a text."""
    with file.open(encoding="utf-8-sig", newline="") as text:
        csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise, less than a long document
        reader = csv.DictReader(text, strict=True)
        try:
            names = list(reader.fieldnames or ())
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{file}: the header names {', '.join(map(repr, twice))} more than once; rename or "
                                "remove all but one")
            for row in reader:
                whole = None not in row and None not in row.values()
                yield reader.line_num, row if whole else DataError(
                    f"{file}, line {reader.line_num}: not as many fields as the header has ({reader.fieldnames}); "
                    "quote fields that hold commas")
        except csv.Error as error:  # where the next row begins is unknown
            yield reader.line_num, DataError(f"{file}, line {reader.line_num}: not valid CSV: {error}")
        except UnicodeDecodeError as error:
            yield reader.line_num, DataError(f"{file}, after line {reader.line_num}: not UTF-8 text ({error.reason}); "
                                             "save it as UTF-8")


def _read_parquet(file: Path) -> Numbered:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
        rows = (row for batch in parquet.iter_batches(BLOCK) for row in batch.to_pylist())
        yield from enumerate(rows, start=1)
    except (pa.ArrowException, OSError, ValueError) as error:  # texts that are not UTF-8 are a ValueError
        raise DataError(f"{file}: not a readable parquet file: {error}") from error


READERS = {".jsonl": _read_json_lines, ".json": _read_json_lines, ".csv": _read_csv, ".parquet": _read_parquet}
"""By suffix."""


def _read_saved(directory: Path, split: Split) -> Numbered:
    """A directory written by `datasets`: one split, or several by name."""
    from datasets import DatasetDict, load_from_disk

    if not any((directory / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise DataError(f"{directory} was not written by `datasets`; name one .jsonl, .csv or .parquet "
                        f"file, or several by a pattern such as {directory / '*.jsonl'}")
    try:
        saved = load_from_disk(str(directory))
    except Exception as error:  # a damaged file raises errors of pyarrow or json
        raise DataError(f"{directory}: not a readable data set: {type(error).__name__}: {error}") from error
    if isinstance(saved, DatasetDict):
        if str(split) not in saved:
            raise split.missing(str(directory), saved)
        saved = saved[str(split)]
    elif split.name not in (None, "train", str(saved.split)):
        raise DataError(f"{directory} is one data set without splits, and {split.field}={split.name!r} would be all of "
                        f"it; name the directory of that split, and leave {split.field} out")
    return enumerate(saved, start=1)


UNKNOWN_SPLIT = re.compile(r'Unknown split "[^"]*"\. Should be one of \[(.*)\]')
"""The message of `datasets`, which has no class of its own for it."""


def _read_hub(name: str, split: Split, subset: str | None, revision: str | None) -> Numbered:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, subset, split=str(split), revision=revision)
    except Exception as error:  # datasets raises a dozen kinds: offline, unknown name, unknown split, gated
        if unknown := UNKNOWN_SPLIT.search(str(error)):
            raise split.missing(name, re.findall(r"'([^']*)'", unknown[1])) from None
        raise DataError(f"{name} is neither a local file nor a Hub data set that could be read (split {str(split)!r}): "
                        f"{type(error).__name__}: {error}. Correct the path, or go online for the Hub") from error
    yield from enumerate(rows, start=1)
