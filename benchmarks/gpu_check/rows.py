"""What a check yields: lines of the result, each with what was looked at, what was found, and whether it is as it must
be; and, if it makes several measurements, which one comes next."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "WRONG", "figure", "not run", "FAILED"]
"""A figure has no bound. A row that failed raised an error; one that was not run says why."""
BAD: tuple[Verdict, ...] = ("WRONG", "FAILED")


@dataclass(frozen=True)
class Row:
    """One line. A check yields it as soon as it is measured."""

    what: str
    found: str
    note: str = ""
    verdict: Verdict = "figure"

    @property
    def is_bad(self) -> bool:
        """Whether something is not as it must be."""
        return self.verdict in BAD


def judged(what: str, found: str, right: bool, note: str = "") -> Row:
    """A row with a bound, which `note` states."""
    return Row(what, found, note, "ok" if right else "WRONG")


def not_run(what: str, why: str) -> Row:
    """A row that this machine cannot have."""
    return Row(what, "", why, "not run")


def failed(what: str, error: BaseException | str) -> Row:
    """A row instead of those that an error prevented: its type and the first line of its message."""
    if isinstance(error, str):
        return Row(what, error, "", "FAILED")
    lines = str(error).strip().splitlines() or [""]
    return Row(what, f"{type(error).__name__}: {lines[0]}", "log.txt has the traceback", "FAILED")


@dataclass(frozen=True)
class Agenda:
    """The measurements that a check is about to make, by name."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Begun:
    """A check begins one of them. If its process ends or hangs, it continues behind it in a new process."""

    name: str
    seconds: float
    """What it is expected to take."""


Message = Row | Agenda | Begun
