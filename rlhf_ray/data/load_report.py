"""Report of loading a data set: rows kept, rows left out by reason, and malformed rows with their errors."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_ray.data.contents import Contents, RowDigest
from rlhf_ray.data.rows import Rows
from rlhf_ray.errors import DataError, RLHFError

NAMED_LINES = 5
"""Line numbers in the text of a report, per reason."""
LeftOutRows = list[tuple[str, str, "array[int]"]]
"""(source, reason, line numbers) of all rows that were left out."""


@dataclass
class LeftOut:
    """Rows left out for one reason."""

    lines: dict[str, array[int]] = field(default_factory=dict)
    """Source -> line numbers, in file order; 8 bytes a row."""

    @property
    def count(self) -> int:
        """How many they are."""
        return sum(map(len, self.lines.values()))

    def named(self, most: int, home: str) -> str:
        """Their first lines in words, with the file unless it is `home`."""
        places = [f"{'' if source == home else Path(source).name + ':'}{line}" for source, lines in self.lines.items()
                  for line in lines[:most]][:most]
        return f"line{'s' if self.count > 1 else ''} {', '.join(places)}" + (", ..." if self.count > most else "")


@dataclass
class LoadReport:
    """Rows read, rows kept, and the lines of rows left out by reason. Grows block by block while rows are read."""

    source: str
    rows: int = 0
    kept: int = 0
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """By reason, in the order in which reasons were first met. Reasons that left nothing out are absent."""
    form: str = ""
    """The format of the rows and its columns, in words, where there are several: "conversations (column messages)"."""
    held_out: int = 0
    """Of those kept, how many are not trained on."""
    digest: RowDigest = field(default_factory=RowDigest, repr=False, compare=False)
    """Of all rows read."""
    fix: str = field(default="", repr=False, compare=False)
    """What to do when no row is left."""
    already: Counter[str] = field(default_factory=Counter)
    """How many texts had each beginning-of-sequence token, or token that ends a response, already."""

    def __str__(self) -> str:
        held_out = f", {self.held_out} of them held out" if self.held_out else ""
        form = f", as {self.form}" if self.form else ""
        parts = [f"{self.source}: {self.kept} of {self.rows} rows used{held_out}{form}"]
        parts += [f"{left_out.count} left out: {reason} ({left_out.named(NAMED_LINES, self.source)})"
                  for reason, left_out in self.left_out.items()]
        return "; ".join([*parts, *self.remarks()])

    def remarks(self) -> list[str]:
        """What is worth knowing of texts that are used."""
        return [f"texts that begin or end with {token!r} already: {count} (it is not added again)"
                for token, count in self.already.items()]

    def keep(self, rows: Rows, reasons: dict[str, NDArray[np.bool_]]) -> NDArray[np.int64]:
        """The numbers `[K]` of the rows of a block that are kept; a row left out counts for its first reason.

        Args:
            reasons: reason -> `[N]` True on the rows that it leaves out.
        """
        self.digest.update(rows.records)
        out = np.zeros(len(rows), dtype=bool)
        for reason, wrong in reasons.items():
            if (fresh := np.flatnonzero(wrong & ~out)).size:
                lines = self.left_out.setdefault(reason, LeftOut()).lines.setdefault(rows.source, array("q"))
                lines.extend(rows.lines[i] for i in fresh)
            out |= wrong
        self.rows += len(rows)
        self.kept += int((~out).sum())
        return np.flatnonzero(~out)

    def left_out_rows(self) -> LeftOutRows:
        """All rows that were left out, by source and reason."""
        return [(source, reason, lines) for reason, left_out in self.left_out.items()
                for source, lines in left_out.lines.items()]

    def require_rows(self) -> None:
        """Check that rows are left to train on.

        Raises:
            DataError: no row is left.
        """
        if not self.kept:
            raise DataError(f"no row is left. {self}. {self.fix}")


def contents_of(reports: Iterable[LoadReport]) -> Contents:
    """The digest of each data set."""
    return [[report.source, str(report.digest)] for report in reports]


def left_out_of(reports: Iterable[LoadReport]) -> LeftOutRows:
    """All rows that were left out of several data sets."""
    return [rows for report in reports for rows in report.left_out_rows()]


def left_out_lines(left_out: Iterable[tuple[str, str, array[int]]]) -> str:
    """Rows that were left out as JSON lines: {"source": "d.jsonl", "row": 7, "reason": "longer than max_tokens=9"}."""
    return "".join(json.dumps({"source": source, "row": row, "reason": reason}, ensure_ascii=False) + "\n"
                   for source, reason, rows in left_out for row in rows)


T = TypeVar("T")
MOST = 20
"""Malformed rows after which reading stops: a misspelt column makes every row of a file malformed."""


class RowErrors:
    """Malformed rows of one data set, collected while the others are read, to be reported together.

    Args:
        lenient: collect them all and continue, to show a data set. Training does not continue: a malformed row is an
            error in the data, unlike one that is too long.
    """

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.count = 0
        self._sources: list[str] = []
        self._errors: list[tuple[int, int, RLHFError]] = []
        self._lines: dict[tuple[str, str], array[int]] = {}
        """(source, message without the place) -> line numbers; of all rows if lenient."""

    @property
    def first(self) -> list[RLHFError]:
        """The errors of the first malformed rows, at most MOST, in the order of their files and lines."""
        return [error for *_, error in self._in_order()]

    @property
    def messages(self) -> list[str]:
        """Messages about `first`, with files and lines; rows of a file with the same error share a message."""
        lines: dict[tuple[str, str], list[int]] = {}
        for number, line, error in self._in_order():
            source = self._sources[number]
            lines.setdefault((source, _without_place(error, source, line)), []).append(line)
        return [_placed(source, text, numbers) for (source, text), numbers in lines.items()]

    @property
    def rows(self) -> LeftOutRows:
        """All malformed rows, if lenient, in the form of rows that were left out."""
        return [(source, text.removeprefix(": "), lines) for (source, text), lines in self._lines.items()]

    def _in_order(self) -> list[tuple[int, int, RLHFError]]:
        return sorted(self._errors, key=lambda entry: entry[:2])

    def add(self, error: RLHFError, source: str, line: int) -> None:
        """Add the error of a row; in training, `check` raises once there are MOST of them."""
        if source not in self._sources:
            self._sources.append(source)
        self.count += 1
        if self.count <= MOST:
            self._errors.append((self._sources.index(source), line, error))
        if self.lenient:
            self._lines.setdefault((source, _without_place(error, source, line)), array("q")).append(line)
        if not self.lenient and self.count == MOST:
            self.check()

    def values(self, rows: Rows, read: Callable[[Rows, int], T]) -> tuple[Rows, list[T]]:
        """The well-formed rows and the values that `read` returns for them; errors of the others are added."""
        good, values = [], []
        for i in range(len(rows)):
            try:
                values.append(read(rows, i))
                good.append(i)
            except RLHFError as error:
                self.add(error, rows.source, rows.lines[i])
        return (rows if len(good) == len(rows) else rows.select(good)), values

    @property
    def fatal(self) -> bool:
        """Whether training cannot start any more; reading continues only to report further malformed rows."""
        return self.count > 0 and not self.lenient

    def finish(self, report: LoadReport, fix: str) -> None:
        """After all rows are read, check that none was malformed and some are left, unless lenient.

        Args:
            fix: what to do when no row is left, for the message.

        Raises:
            DataError, ModelError: rows cannot be used, or no row is left.
        """
        report.fix = fix
        if not self.lenient:
            self.check()
            report.require_rows()

    def check(self) -> None:
        """Raise the collected errors: a single one as it is, several as one error with all messages.

        Raises:
            DataError, ModelError: rows cannot be used.
        """
        if not self.count:
            return
        if self.count == 1:
            raise self.first[0]
        listed = "\n".join(f"  {error}" for error in self.messages)
        told = (f"{self.count} rows cannot be used" if self.count < MOST else
                f"at least {self.count} rows cannot be used (`rlhf-ray data inspect --unusable=FILE` names all)")
        raise type(self.first[0])(f"{told}:\n{listed}")


def _without_place(error: RLHFError, source: str, line: int) -> str:
    return str(error).removeprefix(f"{source}, line {line}")


def _placed(source: str, text: str, lines: list[int]) -> str:
    """`text` with the place of its rows before it; a text about the whole file stays as it is."""
    if not text.startswith(":"):
        return text
    return f"{source}, line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}{text}"
