"""What the check prints."""

from collections.abc import Sequence
from dataclasses import dataclass

MARKS = {True: "ok", False: "WRONG", None: ""}


@dataclass(frozen=True)
class Row:
    """One line: what was looked at, what was found, and whether it is as it must be (None: a figure)."""

    what: str
    found: str
    note: str = ""
    right: bool | None = None


def as_text(rows: Sequence[Row], head: str) -> str:
    """The table in Markdown, as it stands in the docs."""
    lines = [f"| {head} | | | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {r.what} | {r.found} | {r.note} | {MARKS[r.right]} |" for r in rows)])
